"""Pictures of what BEN believes, in the course of training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from PIL import Image
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecTransposeImage, is_vecenv_wrapped

from sb3_ben.callbacks.episode import Moment, normalized, play
from sb3_ben.callbacks.pictures import animation, density_figure, encode_gif, spread_figure
from sb3_ben.callbacks.rng import untouched_rng
from sb3_ben.callbacks.tensorboard import ONLY_TENSORBOARD, add_gif, summary_writer
from sb3_ben.callbacks.worlds import action_names, config_of, exact_belief, make_like, own_figures, world_of
from sb3_ben.common.checks import check, check_count
from sb3_ben.history.previous_reward import VecPreviousReward

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN

__all__ = ["BeliefCallback"]


class BeliefCallback(BaseCallback):
    """Logs pictures of what BEN believes in the course of one greedy episode, always in the same world.

    * ``belief/density``: the predicted density of b for each action, at the start, in the middle and at the end,
    * ``belief/spread``: epistemic and aleatoric standard deviation of each action over the episode,
    * ``belief/doors`` (search and rescue): BEN's value of opening each door, beside the exact posterior of what is behind it. The
      value is that of standing before the door with all that the agent remembers,
    * ``belief/episode``: the episode as an animation, with the exact posterior laid over the environment and BEN's values beside
      it; also written as ``beliefs/STEPS.gif`` into the folder of the log.

    Training goes on as if nothing had been drawn. Where there is no distribution of b, since an exact model takes the place of
    the flows or they are switched off, there is a warning at the start and no picture.

    :param n_steps: number of environment steps between two sets of pictures
    :param eval_env: where to play; by default a new environment like that of training
    :param folder: where to write the animations; by default the folder of the log
    :param max_frames: maximal number of steps in an animation, 0 for none
    :param n_samples: number of draws for each density
    :param seed: seed of the world and of the draws
    :param verbose: verbosity level
    """

    model: BEN

    def __init__(
        self,
        n_steps: int = 20_000,
        eval_env: VecEnv | None = None,
        folder: str | None = None,
        max_frames: int = 60,
        n_samples: int = 512,
        seed: int = 0,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        check(n_steps >= 1, f"`n_steps` must be at least 1, got {n_steps}")
        check_count("n_samples", n_samples)
        self.n_steps = n_steps
        self.eval_env = eval_env
        self.folder = folder
        self.max_frames = max_frames
        self.n_samples = n_samples
        self.seed = seed
        self._next = n_steps
        self._draws = True

    # ------------------------------------------------------------------ set-up, at each call of `learn`

    def _init_callback(self) -> None:
        if not hasattr(self.model, "bellman_distribution"):
            raise ValueError(f"BeliefCallback draws the beliefs of BEN; a {type(self.model).__name__} has none")
        with untouched_rng(self.seed):
            venv = self._make_env() if self.eval_env is None else self.eval_env
            self.venv = self._wrapped(venv)
            self.config = config_of(self.venv)
            self._draws = self._can_draw()
        self._next = (self.model.num_timesteps // self.n_steps + 1) * self.n_steps

    def _make_env(self) -> VecEnv:
        """A new environment like that of training, which draws itself if it can."""
        world = world_of(self.training_env)
        if world is not None:
            return make_like(world, 1, self.seed, render_mode="rgb_array")
        spec = self.training_env.get_attr("spec")[0]
        if spec is None:
            raise ValueError("The environment of training is not registered: give BeliefCallback one like it as `eval_env`")
        modes = self.training_env.get_attr("metadata")[0].get("render_modes", ())
        kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
        if self.max_frames and "rgb_array" in modes:
            kwargs["render_mode"] = "rgb_array"
        return DummyVecEnv([lambda: gym.make(spec.id, **kwargs)])

    def _wrapped(self, venv: VecEnv) -> VecEnv:
        """The environment as the model sees that of training."""
        if venv.observation_space != self.model.observation_space and is_vecenv_wrapped(self.training_env, VecTransposeImage):
            venv = VecTransposeImage(venv)
        if venv.observation_space != self.model.observation_space:
            raise ValueError("The environment of training is wrapped: give BeliefCallback one like it as `eval_env`")
        if venv.num_envs != 1:
            raise ValueError(f"`eval_env` must be a single environment, got {venv.num_envs}")
        return venv if isinstance(venv, VecPreviousReward) else VecPreviousReward(venv)

    def _can_draw(self) -> bool:
        """Whether there is a distribution of b. It is asked for here, since an error in the middle would end the run."""
        try:
            observation: Any = normalized(self.model, self.venv.reset())
            self.model.bellman_distribution(observation, n_samples=self.n_samples)
        except ValueError as reason:
            if self._draws:  # once, however often `learn` is called
                warnings.warn(f"BeliefCallback draws no pictures, training goes on without them: {reason}", stacklevel=2)
            return False
        return True

    # ------------------------------------------------------------------ every `n_steps`

    def _on_step(self) -> bool:
        if self._draws and self.num_timesteps >= self._next:
            self._next = (self.num_timesteps // self.n_steps + 1) * self.n_steps
            with untouched_rng(self.seed):
                self._log(self.play())
        return True

    def play(self) -> list[Moment]:
        """Play one episode, the same in every call, and note at each step what BEN believes."""
        self.venv.seed(self.seed)
        return play(self.model, self.venv, exact_belief(self.config), self.n_samples, self.max_frames)

    def _log(self, moments: list[Moment]) -> None:
        names = action_names(self.config) or self._numbered_actions()
        figures = {"density": density_figure(moments, names), "spread": spread_figure(moments, names)}
        figures |= own_figures(self.config, self.model, moments, self.n_samples)
        for name, figure in figures.items():
            self.logger.record(f"belief/{name}", Figure(figure, close=False), exclude=ONLY_TENSORBOARD)
        self.logger.dump(self.num_timesteps)  # as EvalCallback does, so that pictures have the steps they belong to
        if moments[0].frame is not None:
            self._log_animation(animation(moments, names))

    def _numbered_actions(self) -> tuple[str, ...]:
        """Names of the actions of an environment that has none for them."""
        space = self.model.policy.action_space
        return tuple(f"action {space.start + i}" for i in range(space.n))

    def _log_animation(self, frames: list[Image.Image]) -> None:
        gif = encode_gif(frames)
        log_folder = self.logger.get_dir()
        folder = self.folder or (Path(log_folder) / "beliefs" if log_folder else None)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{self.num_timesteps}.gif").write_bytes(gif)
        writer = summary_writer(self.logger)
        if writer is not None:
            add_gif(writer, "belief/episode", gif, frames[0].size, self.num_timesteps)
