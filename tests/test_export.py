"""Exported policies against the policy itself, over an episode."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th

from sb3_ben import BEN, make_vec
from sb3_ben.common.export import GreedyStep, export_onnx, export_torchscript
from tests.test_ben import tiny

ENVIRONMENTS = ["Tiger-v0", "SearchAndRescue5x5-v0"]


def play(model: BEN, env_id: str, step: Any, n_envs: int = 3, n_steps: int = 8) -> None:
    """Play by the exported policy and compare actions and values with those of the model."""
    venv = make_vec(env_id, n_envs, seed=0)
    observation: Any = venv.reset()
    n_state = len(model.policy.q_net.initial_hidden(1))
    action, reward = np.full(n_envs, -1), np.zeros(n_envs, dtype=np.float32)
    state = [part.numpy() for part in model.policy.q_net.initial_hidden(n_envs)]
    memory = model.policy.initial_memory(n_envs)
    for _ in range(n_steps):
        with th.no_grad():
            rewards = th.as_tensor(reward)
            now = model.policy.step(th.as_tensor(observation), memory, rewards, th.zeros(n_envs, dtype=th.bool))
        expected = model.policy.bellman_units.unstandardize(now.encoding.q_values).numpy()
        action, values, *state = step(observation, action, reward, *state)
        assert np.allclose(values, expected, rtol=1e-4, atol=1e-4)
        assert np.array_equal(action, expected.argmax(axis=-1))
        assert len(state) == n_state
        memory = memory._replace(hidden=now.hidden, actions=th.as_tensor(action))
        observation, reward, _, _ = venv.step(np.asarray(action))


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"])
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_torchscript(policy: str, env_id: str, tmp_path: Path) -> None:
    model = tiny(policy, make_vec(env_id, 2)).learn(40)
    export_torchscript(model.policy, tmp_path / "policy.pt")
    loaded = th.jit.load(str(tmp_path / "policy.pt"))
    play(model, env_id, lambda *inputs: [out.numpy() for out in loaded(*(th.as_tensor(x) for x in inputs))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"])
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_onnx(policy: str, env_id: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = tiny(policy, make_vec(env_id, 2)).learn(40)
    export_onnx(model.policy, tmp_path / "policy.onnx")
    session = runtime.InferenceSession(tmp_path / "policy.onnx")
    names = [item.name for item in session.get_inputs()]

    def step(*inputs: np.ndarray) -> list[np.ndarray]:
        given = {name: np.asarray(value) for name, value in zip(("observation", "previous_action", "previous_reward"), inputs)}  # noqa: B905
        given |= {f"state_{i}": value for i, value in enumerate(inputs[3:])}
        return session.run(None, {name: given[name] for name in names})

    play(model, env_id, step)


def test_dictionaries_are_refused() -> None:
    from stable_baselines3.common.envs import SimpleMultiObsEnv

    model = tiny("MultiInputLstmPolicy", SimpleMultiObsEnv(channel_last=True))
    with pytest.raises(ValueError, match="dictionary"):
        GreedyStep(model.policy)


def test_actions_that_start_elsewhere() -> None:
    env = gym.wrappers.TransformAction(gym.make("Tiger-v0"), lambda a: a - 4, gym.spaces.Discrete(3, start=4))
    model = tiny(env=env).learn(40)
    state = model.q_net.initial_hidden(1)
    exported, *_ = GreedyStep(model.policy)(th.zeros(1, dtype=th.long), th.tensor([-1]), th.zeros(1), *state)
    assert exported.numpy() == model.predict(np.array([0]), deterministic=True)[0]
