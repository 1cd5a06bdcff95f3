"""Recurrent layers of our own, and the features extractor of search and rescue."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_ben import BEN, make_vec
from sb3_ben.envs.extractors import RescueExtractor
from sb3_ben.envs.search_and_rescue import LISTEN
from sb3_ben.history.cells import LinearCell, linear_scan
from sb3_ben.history.encoder import HistoryQNetwork
from sb3_ben.history.samples import Observed


@pytest.mark.parametrize("n_steps", [1, 2, 7, 32])
def test_scan_equals_a_loop(n_steps: int) -> None:
    inputs, decay, z = th.randn(n_steps, 3, 5), th.rand(5), th.randn(3, 5)
    scanned = linear_scan(inputs, decay, z)
    for x, after in zip(inputs, scanned, strict=True):
        z = decay * z + x
        th.testing.assert_close(after, z)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_linear_rnn_in_two_parts_equals_one_pass(num_layers: int) -> None:
    rnn, inputs, before = LinearCell(4, 6, num_layers), th.randn(9, 3, 4), th.zeros(num_layers, 3, 6)
    whole, (after,) = rnn.recur(inputs, (before,))
    first, between = rnn.recur(inputs[:5], (before,))
    second, (at_last,) = rnn.recur(inputs[5:], between)
    th.testing.assert_close(th.cat((first, second)), whole)
    th.testing.assert_close(at_last, after)


def test_linear_rnn_remembers_for_long_and_learns_from_it() -> None:
    rnn, inputs = LinearCell(1, 32), th.zeros(200, 1, 1)
    jacobian = th.autograd.functional.jacobian(lambda x: rnn.recur(x, (th.zeros(1, 1, 32),))[0][-1, 0], inputs)
    influence = jacobian[:, :, 0, 0].norm(dim=0)  # of every step on the last output
    assert influence[0] > 1e-3 * influence[-2]


@pytest.mark.parametrize("rnn_type", ["lstm", "gru", "linear", "none"])
@pytest.mark.parametrize("n_rnn_layers", [1, 2])
@th.no_grad()
def test_hidden_states_in_one_pass_are_those_of_single_steps(rnn_type: str, n_rnn_layers: int) -> None:
    space = spaces.Box(-1, 1, (4,))
    extractor = FlattenExtractor(space)
    memory: dict[str, Any] = {"rnn_type": rnn_type, "rnn_hidden_size": 6, "n_rnn_layers": n_rnn_layers}
    net = HistoryQNetwork(space, spaces.Discrete(2), extractor, extractor.features_dim, [5], **memory)
    inputs, hidden = th.randn(7, 3, net.n_inputs), net.initial_hidden(3)
    states = net.hidden_states(inputs)
    assert len(states) == {"lstm": 2, "none": 0}.get(rnn_type, 1)
    for t in range(7):
        hidden = net.evaluate(inputs[t : t + 1], hidden).hidden
        for whole, one in zip(states, hidden, strict=True):
            th.testing.assert_close(whole[:, t], one)


def test_agent_with_linear_memory_steps_as_it_replays() -> None:
    kwargs = {"rnn_type": "linear", "rnn_hidden_size": 8, "net_arch": [8], "phi_dim": 4}
    model = BEN("MlpLstmPolicy", make_vec("Tiger-v0", 2, seed=0), policy_kwargs=kwargs, learning_starts=32, batch_size=4, seed=0)
    model.learn(128)
    policy, rng = model.policy, np.random.default_rng(0)
    obs = th.as_tensor(rng.integers(3, size=(6, 2)))
    actions = th.as_tensor(np.vstack((np.full((1, 2), -1), rng.integers(3, size=(5, 2)))))
    rewards = th.as_tensor(rng.normal(size=(6, 2)).astype(np.float32)) * (actions >= 0)
    with th.no_grad():
        whole = policy.encode(Observed(obs, actions, rewards)).encoding
        hidden = policy.initial_memory(2).hidden
        for t in range(6):
            now = slice(t, t + 1)
            encoding, hidden, _ = policy.encode(Observed(obs[now], actions[now], rewards[now]), hidden)
            th.testing.assert_close(encoding.q_values[0], whole.q_values[t], atol=1e-5, rtol=1e-4)


def test_rescue_extractor_measures_distances() -> None:
    env = gym.make("SearchAndRescue5x5-v0", sigma_noise=0.0)
    first, _ = env.reset(seed=0)
    heard = env.step(LISTEN)[0]
    assert isinstance(env.observation_space, spaces.Box)
    extractor = RescueExtractor(env.observation_space)
    features = extractor(th.as_tensor(np.stack((first, heard)))).numpy()
    assert features.shape == (2, extractor.features_dim)
    n_cells, n_entities = 25, len(first) - 2
    assert features[:, 12].tolist() == [1, 1]
    assert features[:, :n_cells].sum() == 2
    distances = np.linalg.norm(env.unwrapped.world.positions[0], axis=1)  # type: ignore[attr-defined]
    np.testing.assert_allclose(features[1, n_cells : n_cells + n_entities] * 5, distances, rtol=1e-4)
    assert not features[0, n_cells : n_cells + n_entities].any()  # nothing heard is not far away


def test_rescue_extractor_passes_on_what_wrappers_add() -> None:
    space = spaces.Box(-2, 2, (2 + 3 + 4,))
    extractor = RescueExtractor(space, n_entities=3)
    features = extractor(th.ones(1, 9))
    assert features.shape == (1, extractor.features_dim) == (1, 25 + 3 + 9)
    with pytest.raises(ValueError, match="n_entities"):
        RescueExtractor(space, n_entities=8)
