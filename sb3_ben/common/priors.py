"""What is known before the first step: a prior over phi, and domain knowledge in four forms that can be combined.

- known transitions (:class:`KnownTransitions`): what some actions in some states lead to, whatever the MDP
- simulations (:class:`Simulations`): environments drawn from the prior, and an agent that knows how to behave in them
- an exact model (:class:`BellmanModel`): the posterior over a few MDPs and what each of them does, in place of both flows
- a belief (:class:`Belief`): a recursive filter whose output joins the learned encoding of the history
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch.distributions import Distribution

from sb3_ben.common.buffers import (
    NO_ACTION,
    HistoryReplayBuffer,
    HistoryReplaySamples,
    Observations,
    as_histories,
    map_observations,
)
from sb3_ben.common.objectives import bellman_target
from sb3_ben.common.vec_previous_reward import VecPreviousReward

if TYPE_CHECKING:
    from sb3_ben.ben.policies import BENPolicy

__all__ = [
    "Belief",
    "BeliefState",
    "BeliefTracker",
    "Believed",
    "BellmanModel",
    "KnownTransitions",
    "Outcomes",
    "Prior",
    "PriorFactory",
    "RewardBelief",
    "Simulations",
    "Transitions",
    "bellman_means",
    "check_phi_prior",
    "first_histories",
    "simulate",
    "terminal_observations",
    "transition_histories",
    "with_last_observations",
    "with_pasts",
]

#: arrays with one row per environment; a filter keeps in them whatever it has to remember of an episode
BeliefState = tuple[np.ndarray, ...]


@runtime_checkable
class Belief(Protocol):
    """A recursive filter of the user's: Kalman, particles, or exact as those of :mod:`sb3_ben.oracles`.

    It must keep nothing of an episode in itself: everything travels in the state, as with a recurrent policy.
    """

    @property
    def size(self) -> int:
        """Number of features."""
        ...

    def initial(self, n_envs: int) -> BeliefState:
        """The state before the first observation of ``n_envs`` episodes: arrays of numbers with one row per episode."""
        ...

    def update(
        self, state: BeliefState, observations: Any, previous_actions: np.ndarray, previous_rewards: np.ndarray
    ) -> BeliefState:
        """The state after new observations.

        :param state: the state before, not to be changed in place
        :param observations: the environment's observations, ``(n_envs, ...)``, or a dictionary of them
        :param previous_actions: the actions that led there, counted from 0; -1 for the first observation of an episode
        :param previous_rewards: the rewards on the way; 0 for a first observation, NaN where they are not known
        """
        ...

    def features(self, state: BeliefState) -> np.ndarray:
        """What the networks get to see, ``(n_envs, size)``: all of a size of about one."""
        ...


@runtime_checkable
class RewardBelief(Belief, Protocol):
    """A filter that also knows what rewards to expect.

    Then Bellman samples are made of these instead of the rewards that happened to come: their mean is the same, and what a rare
    and large reward does to a sample is gone.
    """

    def rewards(self, state: BeliefState) -> np.ndarray:
        """The expected reward of every action, given the history, ``(n_envs, n_actions)``."""
        ...


class Outcomes(NamedTuple):
    """What n pairs of state and action can lead to: K possibilities each, some of which may have probability 0.

    :param probabilities: of each outcome in each of C contexts, ``(n, C, K)``
    :param rewards: ``(n, K)``
    :param observations: successors ``(n, K, ...)``, or a dictionary of them
    :param dones: whether the episode ends there for good, ``(n, K)``
    """

    probabilities: np.ndarray
    rewards: np.ndarray
    observations: Any
    dones: np.ndarray


@runtime_checkable
class BellmanModel(Belief, Protocol):
    """A finite set of MDPs (contexts) with their exact posterior: a filter whose features are the probabilities of the contexts.

    With it, the predictive Bellman operator of every action is a sum over contexts and outcomes, and no flow is needed.
    """

    def outcomes(self, observations: Any, actions: np.ndarray) -> Outcomes:
        """What actions (counted from 0) in the given states lead to in each context.

        :param observations: ``(n, ...)``, or a dictionary of them
        :param actions: ``(n,)``
        """
        ...


class Transitions(NamedTuple):
    """A batch of n known transitions, each from the first step of an episode.

    :param observations: s ``(n, ...)``, or a dictionary of them
    :param actions: a, in the environment's own numbers ``(n,)``
    :param rewards: r ``(n,)``
    :param next_observations: s' ``(n, ...)``
    :param dones: whether the episode ends there for good ``(n,)``
    """

    observations: Any
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: Any
    dones: np.ndarray


class KnownTransitions:
    """A sampler of known transitions from two parts: which (s, a) are known, and what follows them.

    :param pairs: draws n pairs, ``n -> (observations, actions)``
    :param outcomes: draws what follows, ``(observations, actions) -> (rewards, next observations, dones)``
    """

    def __init__(
        self,
        pairs: Callable[[int], tuple[Any, np.ndarray]],
        outcomes: Callable[[Any, np.ndarray], tuple[np.ndarray, Any, np.ndarray]],
    ) -> None:
        self.pairs, self.outcomes = pairs, outcomes

    def __call__(self, n: int) -> Transitions:
        observations, actions = self.pairs(n)
        return Transitions(observations, actions, *self.outcomes(observations, actions))


@dataclass
class Simulations:
    """Whole histories from environments drawn from the prior.

    :param make_env: makes a gymnasium environment, or many at once as a ``VecEnv``; each episode is a new draw from the prior
    :param behaviour: who acts: an agent with SB3's ``predict``, or a function that makes one from the ``VecEnv`` (a demonstrator
        may look into it; values learned from one that knows more than the history are confounded by what it knows); ``None`` for
        random actions only
    :param n_steps: number of transitions to simulate
    :param n_envs: number of environments, where ``make_env`` makes single ones
    :param demonstrations: share of the episodes that the behaviour acts in; the others see random actions
    :param epsilon: probability of a random action in the behaviour's episodes; the behaviour must then have a method
        ``with_actions(state, actions)`` by which its memory is told of them, as BEN's policies and our oracles have
    :param fraction: share of simulated histories in the batches of later training
    """

    make_env: Callable[[], gym.Env | VecEnv]
    behaviour: Any = None
    n_steps: int = 10_000
    n_envs: int = 8
    demonstrations: float = 0.75
    epsilon: float = 0.2
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.make_env):
            raise ValueError(f"`make_env` of simulations must be a function that makes environments, got {self.make_env!r}")
        for name in ("n_steps", "n_envs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of simulations must be at least 1, got {getattr(self, name)}")
        for name in ("demonstrations", "epsilon", "fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` of simulations must lie between 0 and 1, got {getattr(self, name)}")

    def venv(self) -> VecPreviousReward:
        """The environments, carrying the previous reward on their observations."""
        env = self.make_env()
        if not isinstance(env, (gym.Env, VecEnv)):
            raise ValueError(f"`make_env` of simulations must make gymnasium environments or a VecEnv, got {env!r}")
        if isinstance(env, VecEnv):
            return env if isinstance(env, VecPreviousReward) else VecPreviousReward(env)
        rest = [cast(Callable[[], gym.Env], self.make_env) for _ in range(self.n_envs - 1)]
        return VecPreviousReward(DummyVecEnv([lambda: env, *rest]))

    def agent(self, venv: VecEnv) -> Any:
        """Who acts in the given environments, ``None`` for nobody."""
        agent = self.behaviour
        if agent is not None and (isinstance(agent, type) or not hasattr(agent, "predict")):
            agent = agent(venv)
            if not hasattr(agent, "predict"):
                raise ValueError(
                    f"`behaviour` of simulations must have SB3's predict() or make something that has, got {agent!r}"
                )
        if agent is not None and self.epsilon > 0 and not hasattr(agent, "with_actions"):
            raise ValueError("`behaviour` of simulations cannot be told of random actions (with_actions()): use epsilon=0")
        return agent


@dataclass
class Prior:
    """Everything that is known before the first step; all parts are optional and can be combined.

    :param phi: prior over phi, any distribution of ``torch`` or ``zuko`` over vectors of ``phi_dim`` coordinates
    :param transitions: draws known transitions, ``n -> Transitions``
    :param simulations: histories from environments drawn from the prior
    :param model: exact posterior and transition laws of a few MDPs, used in place of both flows
    :param belief: a filter whose features join the learned encoding of the history
    """

    phi: Distribution | None = None
    transitions: Callable[[int], Transitions] | None = None
    simulations: Simulations | None = None
    model: BellmanModel | None = None
    belief: Belief | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "phi": (Distribution, "a distribution"),
            "simulations": (Simulations, "Simulations(...)"),
            "model": (BellmanModel, "a filter with `size`, initial(), update(), features() and outcomes()"),
            "belief": (Belief, "a filter with `size`, initial(), update() and features()"),
        }
        for name, (kind, description) in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"`{name}` of a prior must be {description}, got {value!r}")
        if self.transitions is not None and not callable(self.transitions):
            raise ValueError(f"`transitions` of a prior must be a function n -> Transitions, got {self.transitions!r}")

    @classmethod
    def of(cls, prior: Prior | Distribution | PriorFactory | str | None, env: VecEnv | None = None) -> Prior:
        """What the argument ``prior`` of the algorithm means: a bare distribution is one over phi; a function that makes a prior,
        or its dotted name, is called with the environments."""
        if isinstance(prior, str):
            prior = _named(prior)
        if prior is None or isinstance(prior, Prior):
            return prior or cls()
        if isinstance(prior, Distribution):
            return cls(phi=prior)
        if callable(prior) and not isinstance(prior, type):
            if env is None:
                raise ValueError("`prior` is a function of the environment: give an environment, too")
            made = prior(env)
            if isinstance(made, (Prior, Distribution)):
                return cls.of(made)
            raise ValueError(f"`prior` must make a Prior or a distribution over phi, it made {made!r}")
        raise ValueError(f"`prior` must be a Prior, a distribution over phi or a function that makes one, got {prior!r}")

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))


#: makes a prior, or a distribution over phi, for given environments
PriorFactory = Callable[[VecEnv], "Prior | Distribution"]


def _named(name: str) -> PriorFactory:
    """The function with a dotted name."""
    module, _, function = name.rpartition(".")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`prior` must name a function as package.module.function, got {name!r}: {error}") from error


def check_phi_prior(prior: Distribution, phi_dim: int) -> None:
    """Refuse what is not a distribution over ``phi_dim`` coordinates."""
    if not isinstance(prior, Distribution):
        raise ValueError(f"The prior over phi must be a distribution, got {prior!r}")
    if tuple(prior.batch_shape) or tuple(prior.event_shape) != (phi_dim,):
        shape = f"batch shape {tuple(prior.batch_shape)} and event shape {tuple(prior.event_shape)}"
        raise ValueError(
            f"The prior over phi must have no batch shape and event shape ({phi_dim},) (`phi_dim` of the policy), got {shape}; "
            "torch.distributions.Independent(..., 1) makes one event of many coordinates"
        )
    state = th.get_rng_state()  # looking must not change what is drawn afterwards
    sample = prior.sample(th.Size((2,)))
    th.set_rng_state(state)
    if not (th.isfinite(sample).all() and th.isfinite(prior.log_prob(sample)).all()):
        raise ValueError("The prior over phi gives samples or densities that are not finite")


# ---------------------------------------------------------------------- beliefs


class Believed(NamedTuple):
    """What filters have made of histories.

    :param state: their state
    :param features: their features ``(n_envs, dim)``
    """

    state: BeliefState
    features: np.ndarray


class BeliefTracker:
    """Runs the user's filters beside the agent, and looks at everything they return.

    Features are those of all filters in turn. With ``keep_state`` the state of the first filter follows, flattened: replay needs
    it to imagine what the filter would say after other outcomes. Expected rewards of all actions come last, where the first
    filter is a :class:`RewardBelief`.

    :param filters: the filters
    :param keep_state: whether features include the first filter's state
    :param n_actions: number of actions
    """

    def __init__(self, filters: Sequence[Belief], keep_state: bool = False, n_actions: int = 0) -> None:
        self.filters, self.keep_state = tuple(filters), keep_state
        self.n_rewards = n_actions if isinstance(self.filters[0], RewardBelief) else 0
        initial = [self._checked(one, "initial", one.initial(1), 1) for one in self.filters]
        self.shapes = [[part.shape[1:] for part in state] for state in initial]
        self.dtypes = [[part.dtype for part in state] for state in initial]
        self.sizes = [int(one.size) for one in self.filters]
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"`size` of a belief must be at least 1, got {self.sizes}")
        kept = sum(int(np.prod(shape)) for shape in self.shapes[0]) if keep_state else 0
        self.dim = sum(self.sizes) + kept + self.n_rewards

    def initial(self, n_envs: int) -> BeliefState:
        """The state before the first observations."""
        return tuple(part for one in self.filters for part in one.initial(n_envs))

    def begin(self, observations: Observations) -> Believed:
        """What the first observations of episodes tell."""
        n_envs = _length(observations)
        return self.advance(self.initial(n_envs), observations, np.full(n_envs, NO_ACTION), np.zeros(n_envs))

    def advance(self, state: BeliefState, observations: Observations, actions: np.ndarray, rewards: np.ndarray) -> Believed:
        """What new observations tell; actions are counted from 0."""
        n_envs = len(actions)
        rewards = np.where(actions == NO_ACTION, 0.0, rewards)  # what came before an episode is not its business
        observations = map_observations(np.asarray, observations)
        states, features = [], []
        for one, before in zip(self.filters, self._split(state), strict=True):
            after = self._checked(one, "update", one.update(before, observations, actions, rewards), n_envs)
            if [part.shape for part in after] != [part.shape for part in before]:
                raise ValueError(f"update() of {type(one).__name__} changed the shapes of its state")
            states.append(after)
            features.append(self._checked_features(one, after, n_envs))
        if self.keep_state:
            features.append(np.concatenate([part.reshape(n_envs, -1) for part in states[0]], axis=1).astype(np.float32))
        if self.n_rewards:
            features.append(self._checked_rewards(states[0], n_envs))
        joined = features[0] if len(features) == 1 else np.concatenate(features, axis=1)
        return Believed(tuple(part for after in states for part in after), joined)

    def restart(self, believed: Believed | None, observations: Observations, starts: np.ndarray) -> Believed:
        """Begin anew where episodes have started, and keep the rest."""
        if believed is None or len(believed.features) != len(starts) or starts.all():
            return self.begin(observations)
        if not starts.any():
            return believed
        fresh = self.begin(map_observations(lambda part: np.asarray(part)[starts], observations))
        return Believed(
            tuple(_with_rows(old, starts, new) for old, new in zip(believed.state, fresh.state, strict=True)),
            _with_rows(believed.features, starts, fresh.features),
        )

    def reset(self, state: BeliefState, starts: np.ndarray) -> BeliefState:
        """The state with the rows of new episodes replaced by initial ones."""
        if not starts.any():
            return state
        fresh = self.initial(int(starts.sum()))
        return tuple(_with_rows(old, starts, new) for old, new in zip(state, fresh, strict=True))

    def kept_state(self, features: np.ndarray) -> BeliefState:
        """The first filter's state from features ``(n, dim)`` that include it."""
        columns, parts = sum(self.sizes), []
        for shape, dtype in zip(self.shapes[0], self.dtypes[0], strict=True):
            width = int(np.prod(shape))
            parts.append(features[:, columns : columns + width].reshape(len(features), *shape).astype(dtype))
            columns += width
        return tuple(parts)

    def imagine(self, features: np.ndarray, observations: Observations, actions: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """The first filter's features after outcomes that have not happened, from features that include its state."""
        one = self.filters[0]
        after = one.update(self.kept_state(features), observations, actions, rewards)
        return self._checked_features(one, after, len(actions))

    def expected_rewards(self, beliefs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """What the first filter expected of actions ``(...)``, counted from 0, from features ``(..., dim)``."""
        return beliefs[..., self.dim - self.n_rewards :].gather(-1, actions[..., None])[..., 0]

    def _checked_rewards(self, state: BeliefState, n_envs: int) -> np.ndarray:
        one = cast(RewardBelief, self.filters[0])
        rewards = np.asarray(one.rewards(state), dtype=np.float32)
        if rewards.shape != (n_envs, self.n_rewards) or not np.isfinite(rewards).all():
            raise ValueError(f"rewards() of {type(one).__name__} must return finite numbers of shape {(n_envs, self.n_rewards)}")
        return rewards

    def _split(self, state: BeliefState) -> list[BeliefState]:
        parts, start = [], 0
        for shapes in self.shapes:
            parts.append(tuple(state[start : start + len(shapes)]))
            start += len(shapes)
        return parts

    @staticmethod
    def _checked(one: Belief, method: str, state: Any, n_envs: int) -> BeliefState:
        name = f"{method}() of {type(one).__name__}"
        if not isinstance(state, tuple) or not all(isinstance(part, np.ndarray) for part in state):
            raise ValueError(f"{name} must return a tuple of arrays, got {type(state).__name__}")
        for part in state:
            if part.shape[:1] != (n_envs,):
                raise ValueError(f"{name} must return arrays with {n_envs} rows, one per environment, got shape {part.shape}")
            if part.dtype.kind not in "biuf":
                raise ValueError(f"{name} must return arrays of numbers, got {part.dtype}")
        return state

    @staticmethod
    def _checked_features(one: Belief, state: BeliefState, n_envs: int) -> np.ndarray:
        features = np.asarray(one.features(state), dtype=np.float32)
        name = f"features() of {type(one).__name__}"
        if features.shape != (n_envs, one.size):
            raise ValueError(f"{name} must have shape {(n_envs, one.size)}, got {features.shape}")
        if not np.isfinite(features).all():
            raise ValueError(f"{name} are not finite (rewards are NaN where they are not known)")
        return features


def _length(observations: Observations) -> int:
    return len(next(iter(observations.values())) if isinstance(observations, dict) else observations)


def _with_rows(array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[rows] = values
    return array


def terminal_observations(observations: Observations, dones: np.ndarray, infos: list[dict[str, Any]]) -> Observations:
    """The successors of a step: new observations, and where episodes ended, the last ones of these."""
    ended = [i for i in np.flatnonzero(dones) if infos[i].get("terminal_observation") is not None]
    if not ended:
        return map_observations(np.asarray, observations)
    last = [infos[i]["terminal_observation"] for i in ended]
    if isinstance(observations, dict):
        by_key = {key: np.stack([one[key] for one in last]) for key in observations}
        return {key: _with_rows(np.asarray(part), np.array(ended), by_key[key]) for key, part in observations.items()}
    return _with_rows(np.asarray(observations), np.array(ended), np.stack(last))


# ---------------------------------------------------------------------- known transitions


def transition_histories(
    batch: Transitions,
    observation_space: spaces.Space,
    action_space: spaces.Discrete,
    tracker: BeliefTracker | None,
    device: th.device,
) -> HistoryReplaySamples:
    """Known transitions as histories of a single step, after a look at shapes, spaces and numbers.

    :param batch: the transitions
    :param observation_space: observation space of the algorithm
    :param action_space: its action space
    :param tracker: filters to run along, if any
    :param device: device of the result
    """
    batch = Transitions(*batch)
    actions, rewards, dones = (np.asarray(part) for part in (batch.actions, batch.rewards, batch.dones))
    n = len(actions)
    for name, part in (("actions", actions), ("rewards", rewards), ("dones", dones)):
        if part.shape != (n,):
            raise ValueError(f"`{name}` of known transitions must have shape ({n},), got {part.shape}")
    start = int(action_space.start)
    if not np.issubdtype(actions.dtype, np.integer) or actions.min() < start or actions.max() >= start + action_space.n:
        raise ValueError(f"`actions` of known transitions must be integers of {action_space}, got {actions}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"`rewards` of known transitions are not finite: {rewards}")
    pairs = (("observations", batch.observations), ("next_observations", batch.next_observations))
    observations, successors = (_checked_observations(part, observation_space, n, name) for name, part in pairs)

    def to_tensor(array: np.ndarray) -> th.Tensor:
        return th.as_tensor(array, device=device)

    samples_class: Any = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
    samples = samples_class(
        observations=map_observations(to_tensor, observations),
        actions=to_tensor(actions.astype(np.int64)),
        next_observations=map_observations(to_tensor, successors),
        dones=to_tensor(dones.astype(np.float32)),
        rewards=to_tensor(rewards.astype(np.float32)),
    )
    histories = as_histories(samples, start)
    if tracker is None:
        return histories
    now = tracker.begin(observations)
    after = tracker.advance(now.state, successors, actions - start, rewards)
    return histories._replace(beliefs=to_tensor(np.stack((now.features, after.features))))


def with_pasts(histories: HistoryReplaySamples, length: int) -> HistoryReplaySamples:
    """Known transitions after a past: the last of ``length`` steps each, of which the others are other known transitions.

    What is known of a transition holds whatever came before. Seen only at the beginning of episodes, it would say nothing about
    the memory that an agent arrives with, and the successors would be valued by a network that has never learned of such
    memories: values run away. No past goes on after the end of an episode.

    :param histories: ``length`` times as many histories of a single step
    :param length: number of steps of the histories that they become
    """

    def rows(part: th.Tensor) -> th.Tensor:
        return part.unflatten(0, (length, -1))

    actions, rewards, dones = (rows(part[0]) for part in (histories.actions, histories.rewards, histories.dones))
    mask = th.zeros_like(rewards)
    mask[-1] = (dones[:-1].sum(dim=0) == 0).to(mask.dtype)
    return HistoryReplaySamples(
        observations=map_observations(lambda part: th.cat((rows(part[0]), rows(part[1])[-1:])), histories.observations),
        previous_actions=th.cat((th.full_like(actions[:1], NO_ACTION), actions)),
        previous_rewards=th.cat((th.zeros_like(rewards[:1]), rewards)),
        actions=actions,
        rewards=rewards,
        dones=dones,
        mask=mask,
    )


def _checked_observations(observations: Any, space: spaces.Space, n: int, name: str) -> Observations:
    """Observations of the space, in its type."""
    if isinstance(space, spaces.Dict):
        if not isinstance(observations, dict) or set(observations) != set(space.spaces):
            raise ValueError(f"`{name}` of known transitions must be a dictionary with the keys {list(space.spaces)}")
        checked = {key: _checked_observations(observations[key], part, n, f"{name}[{key!r}]") for key, part in space.items()}
        return cast(Observations, checked)
    array = np.asarray(observations)
    if array.shape != (n, *space.shape):  # type: ignore[misc]
        raise ValueError(f"`{name}` of known transitions must have shape {(n, *space.shape)}, got {array.shape}")  # type: ignore[misc]
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` of known transitions are not finite")
    return array.astype(space.dtype)


# ---------------------------------------------------------------------- simulations


def simulate(
    simulations: Simulations, buffer_kwargs: dict[str, Any], tracker: BeliefTracker | None, seed: int
) -> HistoryReplayBuffer:
    """Fill a buffer of its own with simulated histories; the same seed gives the same histories again.

    :param simulations: what to simulate
    :param buffer_kwargs: observation and action space, device and sequence length of the buffer
    :param tracker: filters to run along, if any
    :param seed: seed of the environments and of the random actions
    """
    venv = simulations.venv()
    for name in ("observation_space", "action_space"):
        if not _alike(getattr(venv, name), buffer_kwargs[name]):
            raise ValueError(f"The simulations have {name} {getattr(venv, name)}, the model has {buffer_kwargs[name]}")
    venv.seed(seed)
    rng = np.random.default_rng(seed)
    n_envs, start = venv.num_envs, int(venv.action_space.start)  # type: ignore[attr-defined]
    n_steps = -(-simulations.n_steps // n_envs)
    belief_dim = 0 if tracker is None else tracker.dim
    buffer = HistoryReplayBuffer(n_steps * n_envs, n_envs=n_envs, belief_dim=belief_dim, **buffer_kwargs)
    agent = simulations.agent(venv)
    obs, starts = venv.reset(), np.ones(n_envs, dtype=bool)
    state, believed, guided = None, None, np.zeros(n_envs, dtype=bool)
    for _ in range(n_steps):
        guided = np.where(starts, rng.random(n_envs) < simulations.demonstrations, guided)
        actions = start + rng.integers(venv.action_space.n, size=n_envs)  # type: ignore[attr-defined]
        if agent is not None:
            chosen, state = agent.predict(obs, state=state, episode_start=starts, deterministic=True)
            actions = np.where(guided & (rng.random(n_envs) >= simulations.epsilon), chosen, actions)
            state = agent.with_actions(state, actions) if simulations.epsilon else state
        new_obs, rewards, dones, infos = venv.step(actions)
        if not np.isfinite(rewards).all():
            raise ValueError(f"The simulations returned a reward that is not finite: {rewards}")
        successors = terminal_observations(new_obs, dones, infos)  # type: ignore[arg-type]
        if tracker is not None:
            now = tracker.restart(believed, obs, starts)  # type: ignore[arg-type]
            believed = tracker.advance(now.state, successors, actions - start, rewards)
            buffer.add_beliefs(now.features, believed.features)
        buffer.add(obs, successors, actions, rewards, dones, infos)  # type: ignore[arg-type]
        obs, starts = new_obs, np.array(dones, dtype=bool)
    venv.close()
    return buffer


def _alike(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether two spaces have the same form; bounds may differ, as in simulations of related problems."""
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        return set(one.spaces) == set(other.spaces) and all(_alike(one[key], other[key]) for key in one.spaces)
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        return one.shape == other.shape and one.dtype == other.dtype
    return one == other


# ---------------------------------------------------------------------- exact models


def first_histories(observations: Observations, tracker: BeliefTracker, device: th.device) -> HistoryReplaySamples:
    """Histories of no transition at all: first observations and what filters make of them.

    :param observations: first observations ``(n, ...)``
    :param tracker: filters
    :param device: device of the result
    """
    features = th.as_tensor(tracker.begin(observations).features, device=device)[None]
    nothing = th.zeros(features.shape[:2], device=device)
    return HistoryReplaySamples(
        observations=map_observations(lambda part: th.as_tensor(np.asarray(part), device=device)[None], observations),
        previous_actions=nothing.long() + NO_ACTION,
        previous_rewards=nothing,
        actions=nothing[:0].long(),
        rewards=nothing[:0],
        dones=nothing[:0],
        mask=nothing[:0],
        beliefs=features,
    )


def with_last_observations(histories: HistoryReplaySamples) -> HistoryReplaySamples:
    """Histories whose last observations count, too, unless they are the end: what has not been tried there is no secret to an
    exact model, and it is there that the agent is to act.

    :param histories: replayed histories
    """

    def again(part: th.Tensor) -> th.Tensor:
        return th.cat((part, part[-1:]))

    nothing = th.zeros_like(histories.previous_rewards[:1])
    begins = histories.mask[:1] if len(histories.mask) else nothing + 1
    is_left = th.cat((begins, histories.mask * (1 - histories.dones)))
    names = ("actions", "rewards", "dones")
    untried = {name: th.cat((getattr(histories, name), nothing.to(getattr(histories, name).dtype))) for name in names}
    return HistoryReplaySamples(
        observations=map_observations(again, histories.observations),
        previous_actions=again(histories.previous_actions),
        previous_rewards=again(histories.previous_rewards),
        mask=th.maximum(th.cat((histories.mask, nothing)), is_left),
        beliefs=None if histories.beliefs is None else again(histories.beliefs),
        **untried,
    )


@th.no_grad()
def bellman_means(policy: BENPolicy, histories: HistoryReplaySamples, gamma: float) -> th.Tensor:
    r"""The predictive Bellman operator of an exact model, for every action after every history, ``(T, B, n_actions)``:

    .. math:: B^+(h_t, a) = \sum_c p(c \mid h_t) \sum_{r, s'} p(r, s' \mid s_t, a, c) (r + \gamma \max_{a'} Q(h_{t+1}, a'))

    :param policy: policy with a model, whose target network gives the values
    :param histories: replayed histories, with the posteriors of the model among their beliefs
    :param gamma: discount
    """
    model, device = cast(BellmanModel, policy.bellman_model), histories.mask.device
    assert histories.beliefs is not None, "an exact model needs its posterior in replay"
    n_steps, n_batch, n_actions = *histories.mask.shape, policy.q_net.n_actions
    n = n_steps * n_batch
    actions = np.tile(np.arange(n_actions), n)
    outcomes = _checked_outcomes(model, model.outcomes(_states(policy, histories), actions), n * n_actions)
    rewards, dones = (th.as_tensor(part.reshape(-1), device=device) for part in (outcomes.rewards, outcomes.dones))
    values = _imagined_values(policy, histories, actions, outcomes)
    b = bellman_target(rewards.float(), dones, values, gamma).view(n, n_actions, -1)
    first = 0 if policy.belief is None else int(policy.belief.size)
    posterior = histories.beliefs[:-1, :, first : first + int(model.size)].flatten(0, 1)
    chances = th.as_tensor(outcomes.probabilities, dtype=b.dtype, device=device).view(n, n_actions, int(model.size), -1)
    return th.einsum("nc,nack,nak->na", posterior, chances, b).view(n_steps, n_batch, n_actions)


def _states(policy: BENPolicy, histories: HistoryReplaySamples) -> Any:
    """The last states of all histories, once for each action, in the environment's shape."""

    def states(part: th.Tensor, space: spaces.Space) -> np.ndarray:
        rows = part[:-1].reshape(-1, *cast(tuple[int, ...], space.shape))
        return rows.repeat_interleave(policy.q_net.n_actions, dim=0).cpu().numpy()

    if isinstance(policy.observation_space, spaces.Dict):
        parts = cast(dict[str, th.Tensor], histories.observations)
        return {key: states(parts[key], space) for key, space in policy.observation_space.spaces.items()}
    return states(cast(th.Tensor, histories.observations), policy.observation_space)


def _imagined_values(policy: BENPolicy, histories: HistoryReplaySamples, actions: np.ndarray, outcomes: Outcomes) -> th.Tensor:
    """The target network's best values after every outcome of every action, in the units of rewards, in one row."""
    net, device, n_outcomes = policy.q_net_target, histories.mask.device, outcomes.rewards.shape[1]
    repeats = net.n_actions * n_outcomes
    flat = map_observations(lambda part: np.asarray(part).reshape(-1, *part.shape[2:]), outcomes.observations)
    actions, rewards = np.repeat(actions, n_outcomes), outcomes.rewards.reshape(-1).astype(np.float32)
    beliefs = cast(th.Tensor, histories.beliefs)[:-1].flatten(0, 1).repeat_interleave(repeats, dim=0)
    if policy.tracker is not None and policy.belief is not None:
        imagined = policy.tracker.imagine(beliefs.cpu().numpy(), flat, actions, rewards)
        beliefs = th.as_tensor(imagined, device=device)
    inputs = net.history_input(
        map_observations(lambda part: th.as_tensor(part, device=device)[None], flat),
        th.as_tensor(actions, device=device)[None],
        policy.reward_units.standardize(th.as_tensor(rewards, device=device))[None],
        beliefs[None],
    )
    hidden = tuple(part.repeat_interleave(repeats, dim=1) for part in _hidden_states(policy, histories))
    return policy.bellman_units.unstandardize(net.evaluate(inputs, hidden)[1][0].max(dim=-1).values)


def _hidden_states(policy: BENPolicy, histories: HistoryReplaySamples) -> tuple[th.Tensor, ...]:
    """The target network's memory after each of the histories' first T observations, ``(layers, T * B, size)``."""
    net = policy.q_net_target
    rewards = policy.reward_units.standardize(histories.previous_rewards)
    inputs = net.history_input(histories.observations, histories.previous_actions, rewards, histories.beliefs)
    return tuple(part.flatten(1, 2) for part in net.hidden_states(inputs[:-1]))


def _checked_outcomes(model: BellmanModel, outcomes: Outcomes, n: int) -> Outcomes:
    """Outcomes of n pairs, after a look at shapes and numbers."""
    name = f"outcomes() of {type(model).__name__}"
    outcomes = Outcomes(np.asarray(outcomes[0]), np.asarray(outcomes[1]), outcomes[2], np.asarray(outcomes[3]))
    n_outcomes = outcomes.rewards.shape[-1]
    shapes = {"probabilities": (n, int(model.size), n_outcomes), "rewards": (n, n_outcomes), "dones": (n, n_outcomes)}
    for part, shape in shapes.items():
        if getattr(outcomes, part).shape != shape:
            raise ValueError(f"`{part}` in {name} must have shape {shape}, got {getattr(outcomes, part).shape}")
    if not np.isfinite(outcomes.rewards).all():
        raise ValueError(f"`rewards` in {name} are not finite")
    chances = outcomes.probabilities
    if not (chances.min() >= 0 and np.allclose(chances.sum(axis=-1), 1)):
        raise ValueError(f"`probabilities` in {name} must not be negative and sum to 1 over the outcomes in every context")
    return outcomes
