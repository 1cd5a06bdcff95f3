"""The tiger experiment of the paper (appendix E.1): exact posterior, exact pushforward, one life of 11 steps.

python -m benchmarks.tiger_paper [--updates 1 5 10 20 50 100] [--seeds 20] [--tau 0.1] [--imagined 0] [--pretrain 0]

At every time step the agent makes N steps on the MSBBE of its history so far (Adam, learning rate 0.02, GRU of 32 units) and then
acts greedily; a target network follows in every step. Every seed is a new network in a new world. Printed are the returns after
each step, median and mean over seeds with its 95 % interval, beside the Bayes-optimal agent and posterior sampling in the same
worlds, and how far Q is from the exact action values along the optimal agent's path.

The paper has no target network (``--tau 1``): the successors of the history are valued by the network that is being learned,
which has never seen them, and its values run away. What helps more than a target network are histories imagined from the prior
with random actions, in every step (``--imagined``) or before the first action (``--pretrain``, Algorithm 2). The experiment
``tiger_msbbe_steps`` of the harness is the same with BEN's own loop, whose target network follows once at every time step.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch as th

from sb3_ben import BEN, make_vec
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.history.previous_reward import VecPreviousReward
from sb3_ben.history.samples import NO_ACTION, HistoryReplaySamples, join_histories
from sb3_ben.oracles.tiger import BayesOptimal, PosteriorSampling, action_values, bayes_optimal_values
from sb3_ben.oracles.tiger_prior import TigerModel
from sb3_ben.priors import Prior, Simulations

CONFIG, GAMMA = TigerConfig(), 0.9
TEST_SEED = 50_000


class History:
    """One life so far, as the networks read it."""

    def __init__(self) -> None:
        self.observations: list[int] = []
        self.actions: list[int] = [NO_ACTION]
        self.rewards: list[float] = [0.0]
        self.beliefs: list[np.ndarray] = []
        self.model = TigerModel(CONFIG)
        self.state = self.model.initial(1)

    def see(self, observation: int) -> None:
        """The posterior, and the observation it follows."""
        last = np.array([observation]), np.array(self.actions[-1:]), np.array(self.rewards[-1:])
        self.state = self.model.update(self.state, *last)
        self.observations.append(observation)
        self.beliefs.append(self.model.features(self.state)[0])

    def act(self, action: int, reward: float) -> None:
        self.actions.append(action)
        self.rewards.append(reward)

    def samples(self) -> HistoryReplaySamples:
        """All histories up to now; the last has no successor, which the model does not need, and is marked as an end."""
        observations, beliefs = self.observations + self.observations[-1:], self.beliefs + self.beliefs[-1:]
        n = len(self.observations)
        actions, rewards = [*self.actions[:n], 0], [*self.rewards[:n], 0.0]
        zeros = th.zeros(n, 1)
        dones = (th.arange(n) == n - 1).float()[:, None]
        return HistoryReplaySamples(
            observations=th.tensor(observations)[:, None, None],
            previous_actions=th.tensor(actions)[:, None],
            previous_rewards=th.tensor(rewards)[:, None],
            actions=zeros.long(),
            rewards=zeros,
            dones=dones,
            mask=zeros + 1,
            beliefs=th.tensor(np.array(beliefs), dtype=th.float32)[:, None],
        )


def make_agent(seed: int, args: argparse.Namespace) -> BEN:
    """The paper's network, which knows which rewards there are."""
    simulations = Simulations(lambda: make_vec("Tiger-v0", 16), n_steps=11 * 256) if args.pretrain or args.imagined else None
    agent = BEN(
        "MlpGruPolicy",
        make_vec("Tiger-v0", 1),
        prior=Prior(model=TigerModel(CONFIG), simulations=simulations),
        learning_rate=0.02,
        gamma=GAMMA,
        tau=args.tau,
        sequence_length=CONFIG.horizon,
        buffer_size=100,
        policy_kwargs={"net_arch": [32], "rnn_hidden_size": 32},
        seed=seed,
    )
    agent.policy.reward_units.update(th.tensor([CONFIG.reward_tiger, CONFIG.reward_gold, CONFIG.reward_listen]))
    return agent.pretrain(args.pretrain) if args.pretrain else agent


@th.no_grad()
def values_of(agent: BEN, histories: HistoryReplaySamples) -> np.ndarray:
    """Q(h_t, .) along a history, in the units of rewards."""
    encoding = agent.policy.encode(histories.observed).encoding
    return agent.policy.bellman_units.unstandardize(encoding.q_values[:-1, 0]).numpy()


def live(agent: BEN, n_updates: int, seed: int, n_imagined: int) -> np.ndarray:
    """Rewards of one life in which the agent learns before every action."""
    env = make_vec("Tiger-v0", 1, seed=seed)
    history, observation = History(), int(np.asarray(env.reset())[0])
    agent.policy.set_training_mode(True)
    for _ in range(CONFIG.horizon):
        history.see(observation)
        for _ in range(n_updates):
            histories = history.samples()
            agent.update(join_histories(histories, agent.simulated.sample(n_imagined)) if n_imagined else histories)
            agent.follow_target()
        action = int(values_of(agent, history.samples())[-1].argmax())
        observations, rewards, _, _ = env.step(np.array([action]))
        history.act(action, float(rewards[0]))
        observation = int(np.asarray(observations)[0])
    return np.array(history.rewards[1:])


def oracle_life(oracle: Any, seed: int) -> tuple[np.ndarray, History]:
    """Rewards and history of an oracle in the same world."""
    env = VecPreviousReward(make_vec("Tiger-v0", 1, seed=seed))
    history, observations, state, starts = History(), env.reset(), None, np.ones(1, dtype=bool)
    for _ in range(CONFIG.horizon):
        history.see(int(np.asarray(observations)[0]))
        actions, state = oracle.predict(observations, state, starts)
        observations, rewards, _, _ = env.step(actions)
        starts = np.zeros(1, dtype=bool)
        history.act(int(actions[0]), float(rewards[0]))
    return np.array(history.rewards[1:]), history


def report(name: str, rewards: np.ndarray, note: str = "") -> None:
    returns = rewards.cumsum(axis=1)
    half = 1.96 * returns.std(axis=0, ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else np.full(returns.shape[1], np.nan)
    for kind, curve in (("median", np.median(returns, axis=0)), ("mean", returns.mean(axis=0)), ("+-", half)):
        print(f"{name:24s}{kind:8s}" + "".join(f"{value:8.1f}" for value in curve) + (note if kind == "mean" else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 5, 10, 20, 50, 100], help="N, MSBBE steps per time step")
    parser.add_argument("--seeds", type=int, default=20, help="number of networks and worlds")
    parser.add_argument("--tau", type=float, default=0.1, help="how fast the target network follows in each step; 1 for none")
    parser.add_argument("--imagined", type=int, default=0, help="histories imagined from the prior in each step")
    parser.add_argument("--pretrain", type=int, default=0, help="steps of pre-training on simulated histories")
    args = parser.parse_args()
    th.set_num_threads(1)
    worlds = [TEST_SEED + i for i in range(args.seeds)]
    discounted = bayes_optimal_values(CONFIG, GAMMA)
    print(f"{'agent':24s}{'return':8s}" + "".join(f"{t:8d}" for t in range(1, CONFIG.horizon + 1)))
    optimal = [oracle_life(BayesOptimal(CONFIG, discounted), seed) for seed in worlds]
    report("Bayes-optimal", np.array([rewards for rewards, _ in optimal]))
    sampling = PosteriorSampling(CONFIG, seed=0)
    report("posterior sampling", np.array([oracle_life(sampling, seed)[0] for seed in worlds]))
    exact = [action_values(CONFIG, np.array(history.beliefs)[:, 0], GAMMA) for _, history in optimal]
    for n_updates in args.updates:
        start, rewards, errors, agreement = time.process_time(), [], [], []
        for seed, (_, path), truth in zip(worlds, optimal, exact, strict=True):
            agent = make_agent(seed, args)
            rewards.append(live(agent, n_updates, seed, args.imagined))
            values = values_of(agent, path.samples())
            errors.append(np.abs(values - truth).mean())
            agreement.append((values.argmax(axis=1) == truth.argmax(axis=1)).mean())
        note = (
            f"   |Q - Q*| {np.mean(errors):6.1f}, same action {np.mean(agreement):.2f}, CPU {time.process_time() - start:.0f} s"
        )
        report(f"BEN, N = {n_updates}", np.array(rewards), note)


if __name__ == "__main__":
    main()
