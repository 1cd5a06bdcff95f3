"""Checkpoints: all that a killed run needs to go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, unwrap_vec_normalize, unwrap_vec_wrapper


class Stateful(Protocol):
    """What keeps the numbers of a run."""

    def state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


def random_state(model: BaseAlgorithm) -> dict[str, Any]:
    """The state of all generators that training draws from, but for those of the environments."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": th.get_rng_state(),
        "actions": model.action_space.np_random.bit_generator.state,
    }


def set_random_state(model: BaseAlgorithm, state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    th.set_rng_state(state["torch"])
    model.action_space.np_random.bit_generator.state = state["actions"]


def environment_state(venv: VecEnv) -> dict[str, Any]:
    """The running episodes, and the statistics of ``VecNormalize`` with the returns that SB3 leaves out of its pickles."""
    return {id_: {name: vars(part)[name] for name in names if name in vars(part)} for id_, part, names in _stateful(venv)}


def set_environment_state(venv: VecEnv, state: dict[str, Any]) -> None:
    for id_, part, _ in _stateful(venv):
        vars(part).update(state[id_])


def _stateful(venv: VecEnv) -> list[tuple[str, Any, tuple[str, ...]]]:
    """The parts of an environment that change in the course of episodes, and what of them does."""
    episodes = "envs" if isinstance(venv.unwrapped, DummyVecEnv) else "world"
    parts = [
        ("episodes", venv.unwrapped, (episodes,)),
        ("monitor", unwrap_vec_wrapper(venv, VecMonitor), ("episode_returns", "episode_lengths", "episode_count")),
        ("normalize", unwrap_vec_normalize(venv), ("obs_rms", "ret_rms", "returns", "old_reward", "old_obs")),
    ]
    return [(id_, part, names) for id_, part, names in parts if part is not None]


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a job, oldest first."""
    return sorted(folder.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.rpartition("-")[2]))


def save_checkpoint(folder: Path, model: BaseAlgorithm, recorder: Stateful) -> None:
    """Write all that the run needs to go on, under a name that it only gets once it is complete."""
    final = folder / f"checkpoint-{model.num_timesteps}"
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    venv = model.get_env()
    assert venv is not None
    model.save(unfinished / "model.zip")
    if isinstance(model, OffPolicyAlgorithm):
        model.save_replay_buffer(unfinished / "replay_buffer.pkl")
    state = {
        "random": random_state(model),
        "environments": environment_state(venv),
        "memory": getattr(model, "_last_lstm_states", None),  # which RecurrentPPO does not save
        "recorder": recorder.state(),
    }
    (unfinished / "state.pkl").write_bytes(cloudpickle.dumps(state))
    old = [path for path in checkpoints(folder) if path != final]
    if not final.exists():
        os.replace(unfinished, final)
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def restore(checkpoint: Path, model: BaseAlgorithm, recorder: Stateful) -> None:
    """Put back what SB3's own files leave out."""
    state = cloudpickle.loads((checkpoint / "state.pkl").read_bytes())
    venv = model.get_env()
    assert venv is not None
    set_environment_state(venv, state["environments"])
    if state["memory"] is not None:
        model._last_lstm_states = state["memory"]  # type: ignore[attr-defined]
    recorder.set_state(state["recorder"])
    set_random_state(model, state["random"])
