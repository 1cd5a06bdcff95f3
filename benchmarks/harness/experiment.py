"""Experiments as they are declared in ``benchmarks/experiments/*.yml``, and the jobs that they consist of."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent.parent / "experiments"
COSTS = Path(__file__).with_name("costs.yml")
FIRST_TEST_SEED = 100  # seeds below are for tuning
SEED_STRIDE = 1000  # the zoo seeds environment i with seed + i: with a stride, no two runs share a world
N_TUNING_SEEDS = 40  # so that the worlds of tuning are below those by which it is scored
TUNING_EVALUATION_SEED = 45_000  # of the worlds that score what is tuned
EVALUATION_SEED = 50_000  # of the worlds for evaluation: above all seeds of tuning, below all of training
REFERENCE = "reference"  # the `algo` of agents that know the problem and are not trained
#: algorithms that the harness alone knows, and those whose hyperparameters and costs they have
VARIANTS = {"ben_paper": "ben"}
#: where in this repository a class or a function is that a configuration names: it may move, and remains what it is
MODULE = re.compile(r"\b(?:sb3_ben|benchmarks)\.(?:\w+\.)*(?=\w)")
#: hyperparameters that make a run last seconds, by algorithm
SMOKE: dict[str, dict[str, Any]] = {
    "ben": {
        "n_envs": 4,
        "learning_starts": 32,
        "train_freq": 8,
        "batch_size": 4,
        "target_update_interval": 8,
        "buffer_size": 4000,
    },
    "bootdqn": {"n_envs": 4, "learning_starts": 32, "train_freq": 8, "batch_size": 8, "n_members": 2, "buffer_size": 4000},
    "ppo_lstm": {"n_envs": 4, "n_steps": 20, "batch_size": 40, "n_epochs": 1},
}


@dataclass(frozen=True)
class Environment:
    """An environment of an experiment.

    :param env_id: id in Gymnasium
    :param kwargs: its arguments
    """

    env_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """An agent of an experiment.

    :param algo: name of the algorithm in the zoo
    :param hyperparams: in place of those in the zoo's file. ``policy_kwargs`` are merged with the file's, and a value
        ``{make: package.module.function, ...}`` is what the function returns for the remaining keys
    :param cost: CPU time of a step, relative to the algorithm with the zoo's hyperparameters
    :param cpu_seconds: expected CPU time beside that of the steps, such as pre-training
    :param steps: environment steps of training, where they are not the experiment's
    :param env_kwargs: arguments in which the environments that it is trained in differ from those that it is evaluated in
    """

    algo: str
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0
    cpu_seconds: float = 0.0
    steps: int | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def listed_algo(self) -> str:
        """The algorithm whose hyperparameters and costs it has."""
        return VARIANTS.get(self.algo, self.algo)


@dataclass(frozen=True)
class Evaluation:
    """How agents are evaluated: greedily, in worlds that training has not seen, the same for all.

    :param episodes: number of episodes after training
    :param points: number of evaluations in the course of training
    :param curve_episodes: number of episodes of each of them
    """

    episodes: int = 1000
    points: int = 20
    curve_episodes: int = 100


@dataclass(frozen=True)
class Claim:
    """A statement that the numbers decide.

    :param text: what is claimed
    :param source: who claims it: ``paper`` or ``ours``
    :param test: name of a test in :mod:`benchmarks.harness.claims`
    :param arguments: of the test
    :param why: why it does not hold, as far as that is known
    """

    text: str
    source: str
    test: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    def agents(self) -> list[str]:
        """The agents that it is about."""
        over = self.arguments.get("over", [])
        named = [self.arguments.get("agent"), self.arguments.get("than"), *self.arguments.get("agents", ())]
        return [agent for agent in (*named, *(over if isinstance(over, list) else [over])) if agent is not None]


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    :param name: the name of its file
    :param number: position in the list of experiments
    :param title: what it is, in a line
    :param question: what it is meant to find out
    :param note: what a reader of its numbers has to know
    :param environments: by label
    :param agents: by label
    :param references: agents that know the problem, by their names in :mod:`benchmarks.harness.references`
    :param steps: environment steps of each training run
    :param seeds: number of training runs of each agent
    :param first_seed: the first of their seeds, where runs with those from 100 on have had a part in the choice of settings
    :param evaluation: how agents are evaluated
    :param metrics: what is measured beside the returns, by names in :mod:`benchmarks.harness.metrics`
    :param score: what tables and figures score a run by, see :data:`benchmarks.harness.statistics.SCORES`
    :param figure: ``curves`` along training, ``scores`` where agents have budgets of their own, or ``none`` where only
        metrics count: no scores are shown then
    :param evaluation_seed: of the worlds that agents are evaluated in
    :param claims: what the numbers decide
    :param isolated: whether each job has a process of its own, so that the memory it takes can be told
    :param smoke: fields that are replaced in the smoke version
    """

    name: str
    number: int
    title: str
    question: str
    environments: Mapping[str, Environment]
    agents: Mapping[str, Agent]
    references: tuple[str, ...]
    steps: int
    seeds: int
    first_seed: int = FIRST_TEST_SEED
    evaluation: Evaluation = Evaluation()
    metrics: tuple[str, ...] = ()
    note: str = ""
    score: str = "greedy"
    figure: str = "curves"
    evaluation_seed: int = EVALUATION_SEED
    claims: tuple[Claim, ...] = ()
    isolated: bool = False
    smoke: Mapping[str, Any] = field(default_factory=dict)

    def jobs(self) -> list[Job]:
        """All jobs, seed by seed, so that what is there after half of the time can be compared."""
        from benchmarks.harness.references import has_reference

        references = [
            Job(self, label, reference, None)
            for label, environment in self.environments.items()
            for reference in self.references
            if has_reference(reference, environment.env_id)
        ]
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return references + [
            Job(self, environment, agent, seed) for seed in seeds for environment in self.environments for agent in self.agents
        ]

    def as_smoke(self) -> Experiment:
        """The same experiment, in seconds: what runs is the same, only less of it."""
        smoke = {"steps": 160, "seeds": 1, "evaluation": {"episodes": 8, "points": 1, "curve_episodes": 4}, **self.smoke}
        environments = {
            label: dataclasses.replace(environment, kwargs={**environment.kwargs, **smoke.get("env_kwargs", {})})
            for label, environment in self.environments.items()
        }
        agents = {
            label: dataclasses.replace(
                agent,
                steps=None if agent.steps is None else smoke["steps"],
                hyperparams=_merged(agent.hyperparams, {**SMOKE.get(agent.listed_algo, {}), **_fitting(smoke, agent)}),
            )
            for label, agent in self.agents.items()
        }
        return dataclasses.replace(
            self,
            environments=environments,
            agents=agents,
            steps=smoke["steps"],
            seeds=smoke["seeds"],
            evaluation=Evaluation(**smoke["evaluation"]),
            isolated=False,  # which takes seconds
        )


@dataclass(frozen=True)
class Job:
    """One training run, or one evaluation of an agent that is not trained.

    :param experiment: the experiment that it belongs to
    :param environment: label of the environment
    :param agent: label of the agent, or the name of a reference
    :param seed: seed of the run; ``None`` for a reference
    """

    experiment: Experiment
    environment: str
    agent: str
    seed: int | None

    @property
    def name(self) -> str:
        """A path that is unique among all jobs."""
        return "/".join(_slug(part) for part in (self.experiment.name, self.environment, self.agent, self.seed_name))

    @property
    def seed_name(self) -> str:
        """The last part of the name."""
        return REFERENCE if self.seed is None else str(self.seed)

    @property
    def env(self) -> Environment:
        return self.experiment.environments[self.environment]

    @property
    def algo(self) -> str:
        return REFERENCE if self.seed is None else self.experiment.agents[self.agent].algo

    @property
    def steps(self) -> int:
        """Environment steps of training."""
        return self.experiment.agents[self.agent].steps or self.experiment.steps

    @property
    def training_kwargs(self) -> dict[str, Any]:
        """The arguments of the environments that it is trained in."""
        return {**self.env.kwargs, **self.experiment.agents[self.agent].env_kwargs}

    @property
    def zoo_seed(self) -> int:
        """The seed as the zoo gets it."""
        assert self.seed is not None, "a reference has no seed"
        return SEED_STRIDE * self.seed

    @property
    def cpu_seconds(self) -> float:
        """Expected CPU time, from what was measured for the algorithm and the environment."""
        costs = measured_costs()
        if self.seed is None:
            per_episode = costs[REFERENCE].get(self.env.env_id, costs[REFERENCE]["default"])
            return per_episode * self.experiment.evaluation.episodes
        agent = self.experiment.agents[self.agent]
        measured = costs[agent.listed_algo]
        per_step = measured.get(self.env.env_id, measured["default"]) / 1000
        return agent.cost * per_step * self.steps + agent.cpu_seconds

    def hyperparams(self) -> dict[str, Any]:
        """What replaces the zoo's hyperparameters, with ``policy_kwargs`` complete."""
        changes = copy.deepcopy(dict(self.experiment.agents[self.agent].hyperparams))
        if isinstance(changes.get("policy_kwargs"), dict):
            changes["policy_kwargs"] = {**_policy_kwargs(self.zoo_entry()), **changes["policy_kwargs"]}
        return changes

    def zoo_entry(self) -> dict[str, Any]:
        """The hyperparameters in the zoo's file."""
        return copy.deepcopy(_zoo_entry(self.experiment.agents[self.agent].listed_algo, self.env.env_id))

    def configuration(self) -> dict[str, Any]:
        """All that decides the result: as long as it stays the same, the job need not be repeated."""
        shared = {
            "env_id": self.env.env_id,
            "env_kwargs": dict(self.env.kwargs),
            "evaluation_seed": self.experiment.evaluation_seed,
        }
        if self.seed is None:
            return {**shared, "reference": self.agent, "episodes": self.experiment.evaluation.episodes}
        entry = {name: value for name, value in self.zoo_entry().items() if name != "n_timesteps"}
        differs = self.training_kwargs != dict(self.env.kwargs)
        return {
            **shared,
            **({"training_kwargs": self.training_kwargs} if differs else {}),
            "algo": self.algo,
            "hyperparams": {**entry, **self.hyperparams()},
            "steps": self.steps,
            "seed": self.zoo_seed,
            "evaluation": dataclasses.asdict(self.experiment.evaluation),
            "metrics": list(self.experiment.metrics),
        }

    def digest(self) -> str:
        """A fingerprint of the configuration."""
        return digest_of(self.configuration())


def digest_of(configuration: Mapping[str, Any]) -> str:
    """A fingerprint, which does not tell in which module something is."""
    text = MODULE.sub("", json.dumps(configuration, sort_keys=True, default=str))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fitting(smoke: Mapping[str, Any], agent: Agent) -> dict[str, Any]:
    """The hyperparameters of a smoke version; dictionaries change what an agent has, and give nothing to those who have none."""
    changes = smoke.get("hyperparams", {})
    return {
        name: change
        for name, change in changes.items()
        if not isinstance(change, Mapping) or isinstance(agent.hyperparams.get(name), Mapping)
    }


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes, of which dictionaries only replace what they name."""
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, change) if isinstance(old, Mapping) and isinstance(change, Mapping) else change
    return merged


def _slug(text: str) -> str:
    """A name that any file system takes."""
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in text)


@functools.cache
def measured_costs() -> dict[str, dict[str, float]]:
    """CPU seconds per 1000 environment steps by algorithm and environment; of references, per episode."""
    return yaml.safe_load(COSTS.read_text(encoding="utf-8"))


@functools.cache
def _zoo_entry(algo: str, env_id: str) -> dict[str, Any]:
    from benchmarks.compare import hyperparams

    return hyperparams(algo, env_id)


def _policy_kwargs(entry: dict[str, Any]) -> dict[str, Any]:
    """The policy's arguments in the zoo's file, where they may be Python code."""
    kwargs = entry.get("policy_kwargs", {})
    if isinstance(kwargs, str):
        from rl_zoo3 import exp_manager

        return eval(kwargs, vars(exp_manager))  # as the zoo does
    return dict(kwargs)


# ---------------------------------------------------------------------- reading files


def load(path: Path) -> Experiment:
    """Read an experiment; whatever is misspelt or missing is a ``ValueError`` that names the file."""
    declared = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        experiment = Experiment(name=path.stem, **_parsed(declared))
        _check(experiment)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return experiment


def _parsed(declared: dict[str, Any]) -> dict[str, Any]:
    environments = {label: Environment(**entry) for label, entry in declared["environments"].items()}
    agents = {label: _agent(**entry) for label, entry in declared["agents"].items()}
    return {
        **declared,
        "environments": environments,
        "agents": agents,
        "references": tuple(declared["references"]),
        "steps": int(float(declared["steps"])),
        "evaluation": Evaluation(**declared.get("evaluation", {})),
        "metrics": tuple(declared.get("metrics", ())),
        "claims": tuple(_claim(**entry) for entry in declared.get("claims", ())),
    }


def _agent(steps: str | float | None = None, **arguments: Any) -> Agent:
    return Agent(steps=None if steps is None else int(float(steps)), **arguments)


def _claim(text: str, source: str, test: str, why: str = "", **arguments: Any) -> Claim:
    return Claim(text, source, test, arguments, why)


def _check(experiment: Experiment) -> None:
    from benchmarks.harness import claims, metrics, references, statistics

    known_references = {name for world in references.REFERENCES.values() for name in world}
    for kind, names, known in (
        ("reference", experiment.references, known_references),
        ("metric", experiment.metrics, metrics.METRICS),
        ("test", [claim.test for claim in experiment.claims], claims.TESTS),
        ("source of a claim", [claim.source for claim in experiment.claims], ("paper", "ours")),
        ("agent of a claim", [agent for claim in experiment.claims for agent in claim.agents()], experiment.agents),
        ("environment of a claim", _environments_of_claims(experiment), experiment.environments),
        ("score", [experiment.score], statistics.SCORES),
        ("figure", [experiment.figure], ("curves", "scores", "none")),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"no {kind} is called {name!r}, known are {', '.join(sorted(known))}")
    if experiment.steps < 1 or experiment.seeds < 1:
        raise ValueError("`steps` and `seeds` must be at least 1")
    if experiment.first_seed < FIRST_TEST_SEED:
        raise ValueError(f"`first_seed` must be at least {FIRST_TEST_SEED}: seeds below are for tuning")
    unknown = set(experiment.smoke) - {"steps", "seeds", "evaluation", "env_kwargs", "hyperparams"}
    if unknown:
        raise ValueError(f"`smoke` has unknown fields {', '.join(sorted(unknown))}")


def _environments_of_claims(experiment: Experiment) -> list[str]:
    return [claim.arguments["environment"] for claim in experiment.claims if "environment" in claim.arguments]


def load_all(folder: Path = FOLDER) -> dict[str, Experiment]:
    """All experiments by name, in the order of their numbers."""
    experiments = [load(path) for path in sorted(folder.glob("*.yml"))]
    return {experiment.name: experiment for experiment in sorted(experiments, key=lambda experiment: experiment.number)}


def choose(names: Iterable[str], experiments: Mapping[str, Experiment]) -> list[Experiment]:
    """The experiments that are named; a name that is not known is a ``ValueError`` with the nearest that is."""
    chosen = []
    for name in names:
        if name not in experiments:
            close = difflib.get_close_matches(name, experiments, n=1)
            raise ValueError(f"no experiment is called {name!r}" + (f", do you mean {close[0]!r}?" if close else ""))
        chosen.append(experiments[name])
    return chosen
