"""Three views on a :class:`~sb3_ben.envs.world.World`: ``gymnasium.Env``, SB3's ``VecEnv`` and gymnasium's ``VectorEnv``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_ben.envs.world import World, require

__all__ = ["WorldEnv", "WorldVecEnv", "WorldVectorEnv"]

METADATA: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}


def _make_world(world_class: type[World], n_envs: int, render_mode: str | None, **kwargs: Any) -> World:
    modes = METADATA["render_modes"]
    require(render_mode is None or render_mode in modes, "render_mode", f"must be None or one of {modes}, got {render_mode!r}")
    return world_class(n_envs, world_class.config_class.from_kwargs(**kwargs))


def _given_contexts(options: dict[str, Any] | None, n_envs: int) -> dict[int, Any]:
    """The contexts that ``reset(options={"context": ...})`` asks for, by slot."""
    options = options or {}
    for name in options:
        require(name == "context", f"options[{name!r}]", "is unknown; the only option of reset is 'context'")
    return {} if "context" not in options else dict.fromkeys(range(n_envs), options["context"])


class WorldEnv(gym.Env):
    """One episode at a time of a world.

    ``reset(options={"context": ...})`` starts the episode in a given context instead of one drawn from the prior.

    :param render_mode: ``None``, ``"ansi"`` or ``"rgb_array"``
    :param kwargs: the fields of the world's configuration
    """

    metadata = METADATA
    world_class: ClassVar[type[World]]

    def __init__(self, render_mode: str | None = None, **kwargs: Any) -> None:
        self.world = _make_world(self.world_class, 1, render_mode, **kwargs)
        self.render_mode = render_mode
        self.observation_space = self.world.observation_space
        self.action_space = self.world.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.world.rngs[0] = self.np_random
        self.world.reset([0], _given_contexts(options, 1))
        return self.world.observe()[0], self.world.infos()[0]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rewards, ended = self.world.step(np.asarray(action).reshape(1))
        terminated, truncated = (bool(ended[0]), False) if self.world.terminates else (False, bool(ended[0]))
        return self.world.observe()[0], float(rewards[0]), terminated, truncated, self.world.infos()[0]

    def render(self, belief: Any = None) -> str | np.ndarray | None:
        """Draw the episode, with an optional belief to lay over it (see :mod:`sb3_ben.envs.rendering`)."""
        from sb3_ben.envs.rendering import render

        return render(self.world, 0, self.render_mode, belief)


class WorldVecEnv(VecEnv):
    """``n_envs`` episodes of a world in array operations, as an SB3 vectorised environment.

    Slot ``i`` plays the very episodes that a single environment seeded with ``seed + i`` would play.

    :param n_envs: number of parallel episodes
    :param seed: seeds slot ``i`` with ``seed + i``, like ``VecEnv.seed``
    :param render_mode: ``None``, ``"ansi"`` or ``"rgb_array"``
    :param kwargs: the fields of the world's configuration
    """

    metadata = METADATA
    world_class: ClassVar[type[World]]

    def __init__(self, n_envs: int = 1, seed: int | None = None, render_mode: str | None = None, **kwargs: Any) -> None:
        self.world = _make_world(self.world_class, n_envs, render_mode, **kwargs)
        self.render_mode = render_mode
        self.spec = None
        super().__init__(n_envs, self.world.observation_space, self.world.action_space)
        self._actions = np.zeros(n_envs, dtype=np.int64)
        if seed is not None:
            self.seed(seed)

    def reset(self) -> VecEnvObs:
        contexts: dict[int, Any] = {}
        for i, (seed, options) in enumerate(zip(self._seeds, self._options, strict=True)):
            if seed is not None:
                self.world.rngs[i] = seeding.np_random(seed)[0]
            if options:
                contexts[i] = _given_contexts(options, 1).get(0)
        self.world.reset(range(self.num_envs), contexts)
        self.reset_infos = self.world.infos()
        self._reset_seeds()
        self._reset_options()
        return self.world.observe()

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = np.asarray(actions)

    def step_wait(self) -> VecEnvStepReturn:
        rewards, dones = self.world.step(self._actions)
        infos = self.world.infos()
        for info in infos:
            info["TimeLimit.truncated"] = False
        observations = self.world.observe()
        ended = np.flatnonzero(dones)
        if ended.size:
            for i in ended:
                infos[i]["TimeLimit.truncated"] = not self.world.terminates
                infos[i]["terminal_observation"] = observations[i]
            self.world.reset(ended)
            new_infos = self.world.infos()
            for i in ended:
                self.reset_infos[i] = new_infos[i]
            observations = self.world.observe()
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        pass

    def get_images(self) -> Sequence[np.ndarray | None]:
        from sb3_ben.envs.rendering import render

        return [render(self.world, i, "rgb_array") for i in range(self.num_envs)]  # type: ignore[misc]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        chosen = self._get_indices(indices)
        if hasattr(self, attr_name):
            return [getattr(self, attr_name) for _ in chosen]
        value = getattr(self.world, attr_name)
        per_episode = isinstance(value, (list, np.ndarray)) and len(value) == self.num_envs
        return [value[i] if per_episode else value for i in chosen]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        if hasattr(self.world, attr_name) or len(list(self._get_indices(indices))) != self.num_envs:
            raise NotImplementedError(f"set_attr cannot change `{attr_name}`: the arguments of these episodes are set when made")
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Only ``render`` can be called on single episodes: there are arrays here, not environments."""
        if method_name != "render":
            raise NotImplementedError(f"{type(self).__name__} holds arrays, not environments: none has a `{method_name}`")
        from sb3_ben.envs.rendering import render

        return [render(self.world, i, self.render_mode, *args, **kwargs) for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


class WorldVectorEnv(gym.vector.VectorEnv):
    """``n_envs`` episodes of a world in array operations, as gymnasium's vectorised environment (autoreset in the same step).

    :param num_envs: number of parallel episodes
    :param render_mode: ``None``, ``"ansi"`` or ``"rgb_array"``
    :param kwargs: the fields of the world's configuration
    """

    metadata = {**METADATA, "autoreset_mode": AutoresetMode.SAME_STEP}
    world_class: ClassVar[type[World]]

    def __init__(self, num_envs: int = 1, render_mode: str | None = None, **kwargs: Any) -> None:
        self.world = _make_world(self.world_class, num_envs, render_mode, **kwargs)
        self.render_mode = render_mode
        self.num_envs = num_envs
        self.single_observation_space = self.world.observation_space
        self.single_action_space = self.world.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs)), dtype=bool)
        require(
            mask.shape == (self.num_envs,), "options['reset_mask']", f"must have one entry for each of {self.num_envs} episodes"
        )
        chosen = np.flatnonzero(mask)
        for i, env_seed in enumerate(self._seeds(seed)):
            if env_seed is not None and mask[i]:
                self.world.rngs[i] = seeding.np_random(int(env_seed))[0]
        self.world.reset(chosen, _given_contexts(options, self.num_envs))
        return self.world.observe(), self._collect(range(self.num_envs))

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        """One seed for each episode."""
        if seed is None or isinstance(seed, (int, np.integer)):
            return [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        require(len(seed) == self.num_envs, "seed", f"must be a number or one for each of {self.num_envs} episodes, got {seed!r}")
        return seed

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        rewards, ended = self.world.step(actions)
        never = np.zeros_like(ended)
        observations = self.world.observe()
        infos: dict[str, Any] = {}
        finished = np.flatnonzero(ended)
        if finished.size:
            infos = {"final_obs": self._objects(observations, finished), "_final_obs": ended}
            infos |= {"final_info": self._collect(finished), "_final_info": ended}
            self.world.reset(finished)
            observations = self.world.observe()
        infos |= self._collect(range(self.num_envs))
        terminated, truncated = (ended, never) if self.world.terminates else (never, ended)
        return observations, rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        from sb3_ben.envs.rendering import render

        if self.render_mode is None:
            gym.logger.warn("render() was called without a render_mode: make the environment with one")
            return None
        return tuple(render(self.world, i, self.render_mode) for i in range(self.num_envs))

    def _collect(self, indices: Iterable[int]) -> dict[str, Any]:
        """The info of some slots in gymnasium's form: an array per key and a mask ``_key`` of the slots that have it."""
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[list(indices)] = True
        infos: dict[str, Any] = {name: np.where(mask, values, 0) for name, values in self.world.stats.items()}
        infos["context"] = self._objects(self.world.contexts, np.flatnonzero(mask))
        return infos | {f"_{name}": mask for name in infos}

    def _objects(self, values: Sequence[Any] | np.ndarray, indices: np.ndarray) -> np.ndarray:
        array = np.full(self.num_envs, None, dtype=object)
        for i in indices:
            array[i] = values[i]
        return array
