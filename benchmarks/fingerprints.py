"""What a seed gives, to the last bit: greedy returns and a hash of all parameters, for changes that are to change neither.

python -m benchmarks.fingerprints --output results/before.json              before the change
python -m benchmarks.fingerprints --compare results/before.json --jobs 2    after it: exit code 1 where anything differs

Numbers are those of one machine and one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from joblib import Parallel, delayed
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

from benchmarks.common import tuned
from benchmarks.harness.priors import rescue_weak, tiger_model
from sb3_ben import BEN, BootDQN, evaluate_policy, make_vec

SEED = 7


class Case(NamedTuple):
    """A short training run.

    :param env_id: environment, whose entry in ``hyperparams/`` is used
    :param steps: environment steps
    :param changes: of that entry
    :param algo: name of the algorithm in ``hyperparams/``
    """

    env_id: str
    steps: int
    changes: dict[str, Any] = {}
    algo: str = "ben"


CASES = {
    "tiger": Case("Tiger-v0", 20_000),
    "bandit": Case("BernoulliBandit-v0", 20_000),
    "cart pole": Case("CartPole-v1", 10_000),
    "cart pole without velocities": Case("CartPoleNoVel-v1", 4_000, {"policy": "MlpLstmPolicy", "policy_kwargs": {}}),
    "search and rescue 5x5, exact filter": Case(
        "SearchAndRescue5x5-v0", 5_000, {"prior": "sb3_ben.oracles.rescue_prior.exact_filter", "learning_starts": 1000}
    ),
    "tiger, point": Case("Tiger-v0", 10_000, {"bellman": "point"}),
    "tiger, posterior sampling, averaged": Case(
        "Tiger-v0", 10_000, {"exploration": "posterior", "policy_kwargs": {"averaging": 0.99}}
    ),
    "tiger, model prior": Case("Tiger-v0", 4_000, {"prior": tiger_model(), "n_pretrain_steps": 10}),
    "search and rescue 5x5, known transitions": Case(
        "SearchAndRescue5x5-v0",
        1_000,
        {"prior": rescue_weak(), "policy": "MlpGruPolicy", "sequence_length": 8, "n_pretrain_steps": 20, "batch_size": 32},
    ),
    "BootDQN": Case("Tiger-v0", 5_000, algo="bootdqn"),
}


def environments(env_id: str, n_envs: int, normalize: bool) -> VecEnv:
    """Ours in array operations, others side by side; normalised where the entry asks for it."""
    if "CartPole" not in env_id:
        return VecMonitor(make_vec(env_id, n_envs, seed=SEED))
    import_module("rl_zoo3.import_envs")  # where those of the zoo are registered
    venv = make_vec_env(env_id, n_envs, seed=SEED)
    return VecNormalize(venv, norm_reward=False) if normalize else venv


def train(case: Case) -> BaseAlgorithm:
    settings = {**tuned(case.algo, case.env_id), **case.changes}
    n_envs, normalize = settings.pop("n_envs"), bool(settings.pop("normalize", False))
    for wrapper in ("env_wrapper", "frame_stack"):
        settings.pop(wrapper, None)
    algorithm: Any = {"ben": BEN, "bootdqn": BootDQN}[case.algo]
    model = algorithm(env=environments(case.env_id, n_envs, normalize), seed=SEED, **settings)
    return model.learn(case.steps)


def digest(model: BaseAlgorithm) -> str:
    """A hash of all parameters, whatever they are called and in whichever order they come."""
    parts = sorted(part.detach().cpu().numpy().tobytes() for part in model.policy.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def fingerprint(name: str) -> dict[str, Any]:
    """What comes out of a case."""
    th.set_num_threads(1)
    model = train(CASES[name])
    venv = model.get_env()
    assert venv is not None
    returns, _ = evaluate_policy(model, venv, 64, return_episode_rewards=True, warn=False)
    return {"greedy": float(np.mean(returns)), "parameters": digest(model)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(CASES)} (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, help="file to write the numbers to")
    parser.add_argument("--compare", type=Path, help="file to compare them with")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    names = args.names or list(CASES)
    found = dict(zip(names, Parallel(n_jobs=args.jobs)(delayed(fingerprint)(name) for name in names), strict=True))
    before = json.loads(args.compare.read_text()) if args.compare else {}
    for name, numbers in found.items():
        verdict = "" if name not in before else "same" if before[name] == numbers else f"DIFFERS from {before[name]}"
        print(f"{name:42s}{numbers['greedy']:12.4f}  {numbers['parameters']}  {verdict}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(before.get(name, numbers) != numbers for name, numbers in found.items()))


if __name__ == "__main__":
    sys.exit(main())
