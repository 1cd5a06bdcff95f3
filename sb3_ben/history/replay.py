"""Replay of histories: sequences of consecutive transitions that never cross an episode, a reset or the write position."""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ben.history.samples import NO_ACTION, HistoryReplaySamples, Observations, map_observations

__all__ = ["HistoryReplayBuffer"]


class _LastObservations:
    """The observations in which episodes were cut off, by time and environment.

    Only these successors are not the next row of the buffer, and they are few: a queue with ascending keys, in arrays that are
    copied to larger ones when they are full.
    """

    def __init__(self, like: Observations) -> None:
        self.first, self.last = 0, 0
        self.keys = np.empty(0, dtype=np.int64)
        self.rows = map_observations(lambda array: array[:0].copy(), like)

    def add(self, keys: np.ndarray, rows: Observations, oldest_key: int) -> None:
        """Add rows and forget those under keys smaller than ``oldest_key``."""
        self.first += int(np.searchsorted(self.keys[self.first : self.last], oldest_key))
        if self.last + len(keys) > len(self.keys):
            self._grow(len(keys))
        added = slice(self.last, self.last + len(keys))
        self.keys[added] = keys
        map_observations(lambda array, new: array.__setitem__(added, new), self.rows, rows)
        self.last = added.stop
        if added.start > self.first and keys[0] < self.keys[added.start - 1]:
            self._sort()

    def _sort(self) -> None:
        """Put the queue in order, where an interruption has cut off episodes at a time that other episodes ended at."""
        live = slice(self.first, self.last)
        order = np.argsort(self.keys[live])
        self.keys[live] = self.keys[live][order]
        map_observations(lambda array: array.__setitem__(live, array[live][order]), self.rows)

    def _grow(self, n_new: int) -> None:
        kept = slice(self.first, self.last)
        n_kept = self.last - self.first

        def copy(array: np.ndarray) -> np.ndarray:
            larger = np.zeros((n_kept + max(n_new, n_kept // 2), *array.shape[1:]), dtype=array.dtype)
            larger[:n_kept] = array[kept]
            return larger

        self.keys, self.rows = copy(self.keys), map_observations(copy, self.rows)
        self.first, self.last = 0, n_kept

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the keys are there, and the indices of their rows."""
        indices = self.first + np.searchsorted(self.keys[self.first : self.last], keys)
        found = indices < self.last
        found[found] = self.keys[indices[found]] == keys[found]
        return found, indices


class Filters(Protocol):
    """What reads histories step by step."""

    def restart(self, believed: Any, observations: Observations, starts: np.ndarray) -> Any:
        """What is believed, begun anew where episodes start."""
        ...

    def advance(self, state: Any, observations: Observations, actions: np.ndarray, rewards: np.ndarray) -> Any:
        """What is believed after one more observation."""
        ...


class HistoryReplayBuffer(ReplayBuffer):
    """Replay buffer that returns histories.

    Every observation is stored once, and an explicit flag marks the first step of each episode: an episode may also end without
    ``done``, when training is interrupted. Arrays have SB3's names and shapes; beside them, one observation is kept for each
    episode that was cut off, its last.

    :param buffer_size: maximal number of transitions, over all environments
    :param observation_space: observation space
    :param action_space: action space
    :param device: device of the samples
    :param n_envs: number of parallel environments
    :param optimize_memory_usage: accepted for compatibility; observations are always stored only once
    :param handle_timeout_termination: bootstrap through time limits instead of treating them as the end
    :param sequence_length: maximal number of transitions in a history
    :param belief_dim: number of features that filters given by the user add to each observation, see :meth:`add_beliefs`
    :param warm_up: number of first steps over which the weight of transitions grows to 1, in histories that do not begin where
        their episode does: replay begins there with an empty memory
    """

    observations: Observations  # type: ignore[assignment]
    belief_dim: int = 0  # of buffers that were saved before there were beliefs
    warm_up: int = 0  # likewise
    shortest: int = 1  # episode, as far as known: no window is shorter

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        sequence_length: int = 64,
        belief_dim: int = 0,
        warm_up: int = 0,
    ) -> None:
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        if sequence_length < 1:
            raise ValueError(f"`sequence_length` must be at least 1, got {sequence_length}")
        if warm_up < 0:
            raise ValueError(f"`warm_up` must not be negative, got {warm_up}")
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.sequence_length, self.belief_dim, self.warm_up = sequence_length, belief_dim, warm_up
        shape = (self.buffer_size, n_envs)
        self.observations = self._zeros(shape)
        self.actions = np.zeros((*shape, self.action_dim), dtype=action_space.dtype)
        self.rewards = np.zeros(shape, dtype=np.float32)
        self.dones = np.zeros(shape, dtype=np.float32)
        self.timeouts = np.zeros(shape, dtype=np.float32)
        self.episode_starts = np.zeros(shape, dtype=bool)
        self.beliefs = np.zeros((*shape, belief_dim), dtype=np.float32)
        self.reset()

    def _zeros(self, shape: tuple[int, ...]) -> Observations:
        if isinstance(self.observation_space, spaces.Dict):
            shapes = cast(dict[str, tuple[int, ...]], self.obs_shape)
            return {
                key: np.zeros((*shape, *shapes[key]), dtype=space.dtype) for key, space in self.observation_space.spaces.items()
            }
        return np.zeros((*shape, *self.obs_shape), dtype=self.observation_space.dtype)

    def reset(self) -> None:
        super().reset()
        self.n_added = 0  # rows ever added: the time axis of the keys below
        self.shortest, self._lengths = self.sequence_length, np.zeros(self.n_envs, dtype=np.int64)
        self.latest_observations: Observations = self._zeros((self.n_envs,))
        self._last_observations = _LastObservations(self.latest_observations)
        self.latest_beliefs = np.zeros((self.n_envs, self.belief_dim), dtype=np.float32)
        self._last_beliefs = _LastObservations(self.latest_beliefs)
        self._new_beliefs: tuple[np.ndarray, np.ndarray] | None = None
        self.start_episodes()

    def start_episodes(self) -> None:
        """Say that the next transitions added begin new episodes, whether or not the last ones ended with ``done``."""
        self._next_starts = np.ones(self.n_envs, dtype=bool)

    def add_beliefs(self, now: np.ndarray, after: np.ndarray) -> None:
        """The features of a transition's two observations, each ``(n_envs, belief_dim)``; to be called before :meth:`add`."""
        for features in (now, after):
            if features.shape != (self.n_envs, self.belief_dim):
                raise ValueError(f"Beliefs must have shape {(self.n_envs, self.belief_dim)}, got {features.shape}")
        self._new_beliefs = now, after

    def add(
        self,
        obs: Observations,
        next_obs: Observations,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        if self.n_added > 0:
            was_done = self.dones[self.pos - 1].astype(bool)
            self._keep_successors(self.n_added - 1, self._next_starts & ~was_done)
        self._write_observations(self.observations, self.pos, obs)
        self.actions[self.pos] = np.asarray(action).reshape(self.n_envs, self.action_dim)
        self.rewards[self.pos] = np.asarray(reward)
        self.dones[self.pos] = np.asarray(done)
        if self.handle_timeout_termination:
            timeouts = [info.get("TimeLimit.truncated", False) for info in infos]
            self.timeouts[self.pos] = np.asarray(timeouts).reshape(self.n_envs)
        self.episode_starts[self.pos] = self._next_starts
        self._write_observations(self.latest_observations, slice(None), next_obs)
        if self.belief_dim:
            self._write_beliefs()
        self._keep_successors(self.n_added, (self.dones[self.pos] * self.timeouts[self.pos]).astype(bool))
        self._count_lengths(np.array(done, dtype=bool))
        self._next_starts = np.array(done, dtype=bool)
        self.n_added += 1
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def _count_lengths(self, done: np.ndarray) -> None:
        """Keep the length of the shortest episode that has ended or was interrupted."""
        over = self._lengths[self._next_starts & (self._lengths > 0)]  # interrupted ones too, or ended ones for a second time
        self._lengths = np.where(self._next_starts, 0, self._lengths) + 1
        self.shortest = int(min((self.shortest, *over, *self._lengths[done])))

    def _write_observations(self, target: Observations, where: Any, obs: Observations) -> None:
        def write(array: np.ndarray, values: np.ndarray) -> None:
            array[where] = np.asarray(values).reshape(array[where].shape)

        map_observations(write, target, obs)

    def _write_beliefs(self) -> None:
        if self._new_beliefs is None:
            raise ValueError("This buffer stores beliefs: call add_beliefs() before add()")
        self.beliefs[self.pos], self.latest_beliefs[:] = self._new_beliefs
        self._new_beliefs = None

    def _keep_successors(self, time: int, which: np.ndarray) -> None:
        """Keep the latest observations of some environments as the last ones of their episodes."""
        envs = np.flatnonzero(which)
        if not envs.size:
            return
        oldest_key, keys = (self.n_added - self.buffer_size) * self.n_envs, time * self.n_envs + envs
        self._last_observations.add(keys, map_observations(lambda a: a[envs].copy(), self.latest_observations), oldest_key)
        if self.belief_dim:
            self._last_beliefs.add(keys, self.latest_beliefs[envs], oldest_key)

    def reread(self, filters: Filters) -> Any:
        """Let filters that have changed read all that is stored again; episodes whose beginning is gone, from where it is not.

        :param filters: what reads observations, such as :class:`~sb3_ben.priors.filters.BeliefTracker`
        :return: what they say at the end of the newest step
        """
        believed, oldest = None, self.n_added - self.size()
        for time in range(oldest, self.n_added):
            row = time % self.buffer_size
            now = map_observations(lambda part: part[row], self.observations)  # noqa: B023  called at once
            believed = filters.restart(believed, self._unflattened(now), self.episode_starts[row] | (time == oldest))
            self.beliefs[row] = believed.features
            actions = self.actions[row, :, 0].astype(np.int64) - int(cast(spaces.Discrete, self.action_space).start)
            believed = filters.advance(believed.state, self._unflattened(self._successors(time)), actions, self.rewards[row])
            is_kept, rows = self._last_beliefs.find(time * self.n_envs + np.arange(self.n_envs))
            self._last_beliefs.rows[rows[is_kept]] = believed.features[is_kept]
        if believed is not None:
            self.latest_beliefs[:] = believed.features
        return believed

    def _successors(self, time: int) -> Observations:
        """What followed the transitions of a time; where an episode ended for good, what the next one began with."""
        is_newest = time == self.n_added - 1
        is_kept, rows = self._last_observations.find(time * self.n_envs + np.arange(self.n_envs))

        def gather(stored: np.ndarray, kept: np.ndarray, latest: np.ndarray) -> np.ndarray:
            successors = (latest if is_newest else stored[(time + 1) % self.buffer_size]).copy()
            successors[is_kept] = kept[rows[is_kept]]
            return successors

        return map_observations(gather, self.observations, self._last_observations.rows, self.latest_observations)

    def _unflattened(self, observations: Observations) -> Observations:
        """Observations in the environment's own shape, which SB3 changes where it has none."""
        if isinstance(observations, dict):
            parts = cast(spaces.Dict, self.observation_space).spaces
            return {key: part.reshape(len(part), *cast(Any, parts[key].shape)) for key, part in observations.items()}
        return observations.reshape(len(observations), *cast(Any, self.observation_space.shape))

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> HistoryReplaySamples:  # type: ignore[override]
        """Sample histories around transitions drawn uniformly: whole episodes where they are short enough.

        A window is accepted with a probability of one over its length, so that transitions of short episodes, which come with
        every window around any of them, have the same chance as those of long ones. In episodes longer than a window, the first
        and the last steps have between half of the chance of the others and all of it: a window is moved rather than cut.

        :param batch_size: number of histories
        :param env: associated ``VecNormalize``, to normalise observations and rewards
        """
        drawn: list[np.ndarray] = []
        while sum(part.shape[1] for part in drawn) < batch_size:
            n = batch_size * 2 ** len(drawn)  # more and more, where few are accepted
            ages = np.random.randint(self.size(), size=n)  # steps before the newest
            envs = np.random.randint(self.n_envs, size=n)
            offsets = np.random.randint(self.sequence_length, size=n)
            starts, lengths = self._windows(self.n_added - 1 - ages, envs, offsets)
            drawn.append(np.stack((starts, lengths, envs))[:, self._accepted(lengths)])
        starts, lengths, envs = np.concatenate(drawn, axis=1)[:, :batch_size]
        return self._get_histories(starts, lengths, envs, env)

    def _accepted(self, lengths: np.ndarray) -> np.ndarray:
        """Which windows are kept, for their transitions to have the same chance."""
        if self.shortest >= self.sequence_length:  # all are alike, but for episodes that have just begun
            return np.ones(len(lengths), dtype=bool)
        return np.random.rand(len(lengths)) * lengths < self.shortest

    def _windows(self, times: np.ndarray, envs: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of the window around each time, ``offsets`` steps before it unless its episode begins later, and
        moved back where the episode ends too early to fill it."""
        oldest = self.n_added - self.size()
        first = self._episode_edge(times, envs, oldest)
        last = self._episode_end(times, envs)
        starts = np.maximum(first, np.minimum(times - offsets, last - self.sequence_length + 1))
        return starts, np.minimum(last - starts + 1, self.sequence_length)

    def _episode_edge(self, times: np.ndarray, envs: np.ndarray, oldest: int) -> np.ndarray:
        """The first step of the episode around each time, not looking further back than one sequence."""
        back = np.minimum(np.arange(self.sequence_length), (times - oldest)[:, None])
        flags = self.episode_starts[(times[:, None] - back) % self.buffer_size, envs[:, None]]
        distance = np.where(flags.any(axis=1), flags.argmax(axis=1), back[:, -1])
        return times - distance

    def _episode_end(self, times: np.ndarray, envs: np.ndarray) -> np.ndarray:
        """The last stored step of the episode around each time, not looking further ahead than one sequence."""
        ahead = np.minimum(np.arange(1, self.sequence_length + 1), (self.n_added - 1 - times)[:, None])
        flags = self.episode_starts[(times[:, None] + ahead) % self.buffer_size, envs[:, None]] & (ahead > 0)
        return times + np.where(flags.any(axis=1), flags.argmax(axis=1), ahead[:, -1])

    def _get_histories(
        self, starts: np.ndarray, lengths: np.ndarray, envs: np.ndarray, env: VecNormalize | None
    ) -> HistoryReplaySamples:
        steps = np.arange(lengths.max() + 1)[:, None]
        rows = (starts + np.minimum(steps, lengths - 1)) % self.buffer_size  # padding repeats the last row
        begins = self.episode_starts[rows[:1], envs]
        first = begins | (starts == self.n_added - self.size())  # what was before the oldest step is forgotten
        # what was remembered before a window is missing: the sooner after its start, the less a step counts
        growing = np.minimum((steps[:-1] + 1) / max(self.warm_up, 1), 1)
        mask = (steps[:-1] < lengths) * np.where(begins, 1, growing)
        where = (rows, starts, lengths, envs)
        stored = self._sequences(self.observations, self.latest_observations, self._last_observations, *where)
        observations = self._normalize_obs(stored, env)
        before = (starts + np.minimum(steps, lengths) - 1) % self.buffer_size
        start = int(cast(spaces.Discrete, self.action_space).start)
        previous_actions = self.actions[before, envs, 0].astype(np.int64) - start
        previous_rewards = self.rewards[before, envs]
        previous_actions[:1][first], previous_rewards[:1][first] = NO_ACTION, 0.0
        rows = rows[:-1]
        cuts = self.dones[rows, envs] * self.timeouts[rows, envs]
        dones = self.dones[rows, envs] - cuts
        rewards = self._normalize_reward(self.rewards[rows, envs], env)
        actions = self.actions[rows, envs, 0].astype(np.int64) - start
        arrays = (previous_actions, previous_rewards, actions, rewards, dones, mask.astype(np.float32))
        tensors: list[Any] = [map_observations(self.to_torch, observations), *map(self.to_torch, arrays)]
        parts: dict[str, Any] = dict(zip(HistoryReplaySamples._fields, tensors, strict=False))
        histories = HistoryReplaySamples(**parts, cuts=self.to_torch(cuts))
        if not self.belief_dim:
            return histories
        beliefs = self._sequences(self.beliefs, self.latest_beliefs, self._last_beliefs, *where)
        return histories._replace(beliefs=self.to_torch(cast(np.ndarray, beliefs)))

    def _sequences(
        self,
        stored: Observations,
        latest: Observations,
        kept: _LastObservations,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        envs: np.ndarray,
    ) -> Observations:
        """The stored observations, and after the last transition of each history its successor."""
        ends = starts + lengths - 1
        columns = np.arange(len(starts))
        is_kept, kept_rows = kept.find(ends * self.n_envs + envs)
        newest = ends == self.n_added - 1

        def gather(stored: np.ndarray, kept_obs: np.ndarray, newest_obs: np.ndarray) -> np.ndarray:
            sequences = stored[rows, envs]
            successors = stored[(ends + 1) % self.buffer_size, envs]
            successors[newest] = newest_obs[envs[newest]]
            successors[is_kept] = kept_obs[kept_rows[is_kept]]
            sequences[lengths, columns] = successors
            return sequences

        return map_observations(gather, stored, kept.rows, latest)
