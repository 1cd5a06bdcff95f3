"""BootDQN+prior: an ensemble in one pass, and a citizen of Stable-Baselines3."""

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from torch import nn

from benchmarks.common import HYPERPARAMS, tuned
from sb3_ben import BootDQN, make_vec
from sb3_ben.bootdqn.buffers import BootstrapDictReplayBuffer, BootstrapReplayBuffer
from sb3_ben.bootdqn.policies import EnsembleQNetwork

TINY: dict[str, Any] = {
    "learning_starts": 16,
    "batch_size": 8,
    "buffer_size": 500,
    "target_update_interval": 20,
    "n_members": 4,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
}
IMAGE = {"features_extractor_kwargs": {"features_dim": 8}}


def tiny(policy: str = "MlpPolicy", env: Any = "DeepSea-v0", **kwargs: Any) -> Any:
    policy_kwargs = {**TINY["policy_kwargs"], **kwargs.pop("policy_kwargs", {})}
    return BootDQN(policy, env, **{**TINY, **kwargs, "policy_kwargs": policy_kwargs})


def image_env() -> gym.Env:
    return FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=True)


def dict_env() -> gym.Env:
    return SimpleMultiObsEnv(random_start=True, channel_last=True)


def state_of(module: nn.Module) -> dict[str, th.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def separate_modules(layers: Any, member: int) -> Any:
    """One member of stacked layers as a network of ordinary layers."""
    modules: list[nn.Module] = []
    for layer in layers:
        if hasattr(layer, "weight"):
            linear = nn.Linear(*layer.weight.shape[1:])
            linear.weight.data = layer.weight[member].detach().T
            linear.bias.data = layer.bias[member, 0].detach()
            modules.append(linear)
        else:
            modules.append(layer)
    return nn.Sequential(*modules)


# ---------------------------------------------------------------------- the ensemble


def test_one_pass_equals_a_loop_over_separate_modules() -> None:
    model = tiny(policy_kwargs={"net_arch": [8, 6]}, prior_scale=2.5)
    q_net: EnsembleQNetwork = model.q_net
    obs = th.rand(7, 100)
    values = q_net.member_values(obs)
    assert values.shape == (4, 7, 2)
    for member in range(4):
        expected = separate_modules(q_net.members, member)(obs) + 2.5 * separate_modules(q_net.prior, member)(obs)
        assert th.allclose(values[member], expected, atol=1e-6)
    assert not th.allclose(values[0], values[1])
    assert th.allclose(q_net(obs), values.mean(dim=0))


def test_gradients_equal_those_of_separate_modules() -> None:
    model = tiny(max_grad_norm=1e9)
    q_net, obs = model.q_net, th.rand(7, 100)
    q_net.member_values(obs).square().sum().backward()
    for member in range(4):
        alone = separate_modules(q_net.members, member)
        (alone(obs) + 3.0 * separate_modules(q_net.prior, member)(obs)).square().sum().backward()
        assert th.allclose(q_net.members[0].weight.grad[member], alone[0].weight.grad.T, atol=1e-4)


@pytest.mark.parametrize(
    ("policy", "env", "extractor"),
    [
        ("MlpPolicy", lambda: "DeepSea-v0", {}),
        ("CnnPolicy", image_env, {"features_dim": 8}),
        ("MultiInputPolicy", dict_env, {"cnn_output_dim": 8}),
    ],
)
def test_priors_never_train(policy: str, env: Any, extractor: dict[str, int]) -> None:
    model = tiny(policy, env(), policy_kwargs={"features_extractor_kwargs": extractor}, target_update_interval=1, tau=0.3)
    before = state_of(model.policy)
    model.learn(40)
    after = state_of(model.policy)
    assert list(before) == list(after)
    assert all(value.is_floating_point() for value in after.values())  # as SB3's tools expect of a state dict
    for name in before:
        assert th.equal(before[name], after[name]) == ("prior" in name), name
    own, target = (state_of(net) for net in (model.q_net, model.q_net_target))
    assert all(th.equal(own[name], target[name]) for name in own if "prior" in name)
    assert not any("prior" in name for name, _ in model.policy.named_parameters())


def test_prior_scale() -> None:
    obs = th.rand(3, 100)
    without, small, large = (tiny(prior_scale=scale).q_net for scale in (0.0, 1.0, 3.0))
    trained, prior = without.member_values(obs), without.prior_values(obs)
    assert th.allclose(small.member_values(obs), trained + prior, atol=1e-6)
    assert th.allclose(large.member_values(obs), trained + 3 * prior, atol=1e-6)


def test_a_member_without_data_does_not_change() -> None:
    model = tiny(gradient_steps=0).learn(64)
    model.replay_buffer.masks[:] = 1
    model.replay_buffer.masks[:, :, 2] = 0
    before = state_of(model.q_net.members)
    model.train(gradient_steps=5, batch_size=16)
    for name, value in state_of(model.q_net.members).items():
        changed = (value != before[name]).flatten(1).any(dim=1).tolist()
        assert changed == [True, True, False, True], name


def test_members_learn_from_their_own_transitions_only() -> None:
    """A member's loss depends on no transition outside its bootstrap sample, and on no other member's values."""
    model = tiny(gradient_steps=0).learn(64)
    samples = model.replay_buffer.sample(32)
    losses, spread = model._member_losses(samples)
    hidden = samples.masks[:, 1] == 0
    assert 0 < hidden.sum() < 32
    rewards = samples.rewards + 100 * hidden[:, None]
    changed, _ = model._member_losses(samples._replace(rewards=rewards))
    assert th.isclose(changed[1], losses[1])
    assert not th.isclose(changed[0], losses[0])
    with th.no_grad():
        values = model.q_net.member_values(samples.observations)
        values = values.gather(-1, samples.actions.long().expand(4, -1, -1))[..., 0]
    assert th.isclose(spread, values.numpy().std(axis=0).mean() * th.ones(()))


@pytest.mark.parametrize("double_q", [False, True])
def test_targets_by_hand(double_q: bool) -> None:
    model = tiny(gradient_steps=0, double_q=double_q, gamma=0.9).learn(64)
    model.train(gradient_steps=20, batch_size=16)  # so that the networks and their targets differ
    samples = model.replay_buffer.sample(32)
    with th.no_grad():
        online = model.q_net.member_values(samples.next_observations).numpy()
        target = model.q_net_target.member_values(samples.next_observations).numpy()
    rewards, dones = samples.rewards.numpy()[:, 0], samples.dones.numpy()[:, 0]
    assert dones.any()
    for member, targets in enumerate(model._targets(samples).numpy()):
        chosen = (online if double_q else target)[member].argmax(axis=-1)
        expected = rewards + 0.9 * (1 - dones) * target[member][np.arange(32), chosen]
        assert np.allclose(targets, expected, atol=1e-5)


def test_gradients_are_clipped_member_by_member() -> None:
    model = tiny(max_grad_norm=0.5)
    weights = th.tensor([1e-3, 1.0, 1e3, 0.0])
    (model.q_net.member_values(th.rand(5, 100)) * weights[:, None, None]).sum().backward()
    before = model.q_net.members[0].weight.grad[0].clone()
    model._clip_gradients()
    norms = sum(p.grad.flatten(1).square().sum(dim=1) for p in model.q_net.members.parameters()).sqrt()
    assert th.allclose(norms[1:], th.tensor([0.5, 0.5, 0.0]), atol=1e-4)
    assert th.equal(before, model.q_net.members[0].weight.grad[0])  # the small gradient is left alone


# ---------------------------------------------------------------------- masks


@pytest.mark.parametrize("probability", [0.2, 1.0])
def test_masks_are_drawn_once_for_each_transition(probability: float) -> None:
    model = tiny(
        env=make_vec("DeepSea-v0", 4), mask_probability=probability, buffer_size=4000, n_members=10, gradient_steps=0
    ).learn(2000)
    masks = model.replay_buffer.masks
    assert masks.shape == (1000, 4, 10)
    assert abs(masks[:500].mean() - probability) < 0.02
    assert not masks[500:].any()
    samples = model.replay_buffer.sample(64)
    assert samples.masks.shape == (64, 10)
    assert set(np.unique(samples.masks)) <= {0.0, 1.0}


def test_samples_and_masks_belong_together() -> None:
    """Each transition is marked by its reward, so that the mask of a sample can be looked up."""
    space, actions = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)
    buffer = BootstrapReplayBuffer(30, space, actions, n_envs=3, n_members=5, mask_probability=0.5)
    for step in range(12):  # more than fit
        obs = np.full((3, 1), step / 100, dtype=np.float32)
        rewards = np.arange(3) + 10.0 * step
        buffer.add(obs, obs + 0.5, np.ones((3, 1), dtype=int), rewards, np.zeros(3), [{}] * 3)
    samples: Any = buffer.sample(200)
    steps, envs = np.divmod(samples.rewards.numpy()[:, 0].astype(int), 10)
    assert set(steps) == set(range(2, 12))
    assert set(envs) == {0, 1, 2}
    assert np.array_equal(samples.masks, buffer.masks[steps % 10, envs])
    assert np.allclose(samples.observations[:, 0], steps / 100)
    assert np.allclose(samples.next_observations[:, 0], steps / 100 + 0.5)


def test_replay_buffer_is_saved_with_its_masks(tmp_path: Path) -> None:
    for env in (None, dict_env):
        model = tiny() if env is None else tiny("MultiInputPolicy", env(), policy_kwargs={"net_arch": [4]})
        model.learn(40)
        model.save_replay_buffer(tmp_path / "buffer")
        masks = model.replay_buffer.masks
        assert masks.any()
        assert isinstance(model.replay_buffer, BootstrapReplayBuffer if env is None else BootstrapDictReplayBuffer)
        model.replay_buffer = None
        model.load_replay_buffer(tmp_path / "buffer")
        assert np.array_equal(model.replay_buffer.masks, masks)
        model.learn(10, reset_num_timesteps=False)
    with pytest.raises(ValueError, match="4 members"):
        tiny(n_members=5).load_replay_buffer(tmp_path / "buffer")


def test_buffers_without_masks(tmp_path: Path) -> None:
    """Every member learns from everything, which is said unless it was asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny(replay_buffer_class=ReplayBuffer, mask_probability=1.0).learn(40)
    before = state_of(model.q_net.members)
    model.train(gradient_steps=1, batch_size=8)
    after = state_of(model.q_net.members)
    assert all((after[name] != before[name]).flatten(1).any(dim=1).all() for name in before)
    model.save_replay_buffer(tmp_path / "buffer")
    with pytest.warns(UserWarning, match="mask_probability"):
        tiny().load_replay_buffer(tmp_path / "buffer")
    with pytest.warns(UserWarning, match="mask_probability"):
        tiny("MultiInputPolicy", BitFlippingEnv(4), replay_buffer_class=HerReplayBuffer).learn(40)


def test_n_step_returns() -> None:
    with pytest.warns(UserWarning, match="NStepReplayBuffer"):
        model = tiny(n_steps=3, gamma=0.5).learn(60)
    samples = model.replay_buffer.sample(32)
    with th.no_grad():
        values = model.q_net_target.member_values(samples.next_observations).max(dim=-1).values
    expected = samples.rewards.T + samples.discounts.T * (1 - samples.dones.T) * values
    assert set(samples.discounts.unique().tolist()) >= {0.125}
    assert th.allclose(model._targets(samples), expected)


def test_optimize_memory_usage() -> None:
    model = tiny(optimize_memory_usage=True, replay_buffer_kwargs={"handle_timeout_termination": False}).learn(60)
    assert model._n_updates > 0


# ---------------------------------------------------------------------- one member for each episode


class Members(BaseCallback):
    """The members that acted in each step, and the episodes that ended with it."""

    def __init__(self, stop_after: int = 10**9) -> None:
        super().__init__()
        self.members: list[np.ndarray] = []
        self.dones: list[np.ndarray] = []
        self.stop_after = stop_after

    def _on_step(self) -> bool:
        model: Any = self.model
        self.members.append(model.active_members.copy())
        self.dones.append(self.locals["dones"].copy())
        return self.n_calls < self.stop_after


def check_one_member_per_episode(members: list[np.ndarray], dones: list[np.ndarray]) -> None:
    n_changes, n_ended = 0, 0
    for step in range(1, len(members)):
        changed = members[step] != members[step - 1]
        assert not (changed & ~dones[step - 1]).any()
        n_changes += changed.sum()
        n_ended += dones[step - 1].sum()
    assert n_changes > 0.5 * n_ended > 0  # drawn from ten members, a new one is another in nine of ten cases


def test_one_member_per_episode_and_environment() -> None:
    """Episodes end at different times in different environments, and go on over several calls of `learn`."""
    model = tiny(env=make_vec_env("CartPole-v1", 3, seed=0), n_members=10)
    callback = Members()
    model.learn(60, callback=callback)
    for _ in range(6):
        model.learn(99, callback=callback, reset_num_timesteps=False)
    assert any(0 < dones.sum() < 3 for dones in callback.dones)
    assert any(len(set(members)) > 1 for members in callback.members)
    check_one_member_per_episode(callback.members, callback.dones)


def test_members_are_drawn_anew_after_a_reset_and_after_a_stop() -> None:
    model = tiny(n_members=1000, train_freq=1)
    model.learn(15)
    running = model.active_members.copy()
    model.learn(3, reset_num_timesteps=False)
    assert np.array_equal(running, model.active_members)  # the same episode
    model.learn(3)
    assert not np.array_equal(running, model.active_members)
    callback = Members(stop_after=10)  # at the end of an episode
    model.learn(100, callback=callback)
    assert callback.dones[-1].all()
    assert not np.array_equal(callback.members[-1], model.active_members)
    model.set_env(make_vec("DeepSea-v0", 1))
    running = model.active_members.copy()
    model.learn(3, reset_num_timesteps=False)
    assert not np.array_equal(running, model.active_members)


def test_training_acts_by_the_active_members() -> None:
    model = tiny(env=make_vec("DeepSea-v0", 6), n_members=20, learning_starts=0).learn(60)
    for _ in range(10):
        actions, _ = model._sample_action(0, None, 6)
        values = model.member_values(model._last_obs)
        assert np.array_equal(actions, values[model.active_members, np.arange(6)].argmax(axis=-1))
        model._begin_episodes(np.array([True, False] * 3))


def test_predict() -> None:
    model = tiny(env=make_vec("DeepSea-v0", 3), n_members=50).learn(60)
    obs = np.eye(100, dtype=np.float32)[:40]
    values = model.member_values(obs)
    assert values.shape == (50, 40, 2)
    actions, state = model.predict(obs, deterministic=True)
    assert np.array_equal(actions, values.mean(axis=0).argmax(axis=-1))
    assert state is None
    actions, state = model.predict(obs)
    for _ in range(3):  # the members stay
        assert np.array_equal(actions, values[state[0], np.arange(40)].argmax(axis=-1))
        actions, next_state = model.predict(obs, state, np.zeros(40, dtype=bool))
        assert np.array_equal(state[0], next_state[0])
        state = next_state
    starts = np.arange(40) < 20
    _, next_state = model.predict(obs, state, starts)
    assert np.array_equal(state[0][20:], next_state[0][20:])
    assert (state[0][:20] != next_state[0][:20]).mean() > 0.7
    single, state = model.predict(obs[0])
    assert single.shape == ()
    assert state[0].shape == (1,)
    assert model.member_values(obs[0]).shape == (50, 2)
    with pytest.raises(ValueError, match="`state`"):
        model.predict(obs, state)
    with pytest.raises(ValueError, match="mixing Gym API"):
        model.predict((obs[0], {}))
    before = model.active_members.copy()
    evaluate_policy(model, make_vec("DeepSea-v0", 2), 4, deterministic=False, warn=False)
    assert np.array_equal(before, model.active_members)  # evaluation leaves training alone


def test_epsilon() -> None:
    model = tiny(exploration_initial_eps=1.0, exploration_final_eps=0.5, exploration_fraction=0.5).learn(32)
    assert np.isclose(model.exploration_rate, 0.5)
    model.exploration_rate = 1.0
    obs = np.tile(np.eye(100, dtype=np.float32)[:1], (2000, 1))
    assert abs(model.predict(obs)[0].mean() - 0.5) < 0.05
    assert tiny().exploration_rate == 0.0


def test_actions_that_do_not_start_at_zero() -> None:
    class Shifted(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(2, start=5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
            super().reset(seed=seed)
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
            assert self.action_space.contains(int(action))
            return 1, float(action == 6), True, False, {}

    model = tiny(env=Shifted(), gamma=0.0, learning_rate=1e-2, train_freq=1, exploration_final_eps=0.2).learn(300)
    assert model.predict(np.array(0), deterministic=True)[0] == 6


# ---------------------------------------------------------------------- a citizen of SB3


@pytest.mark.parametrize(("policy", "env"), [("MlpPolicy", None), ("CnnPolicy", image_env), ("MultiInputPolicy", dict_env)])
def test_save_and_load(policy: str, env: Any, tmp_path: Path) -> None:
    kwargs = {"CnnPolicy": {"policy_kwargs": IMAGE}}.get(policy, {})
    model = tiny(policy, make_vec("DeepSea-v0", 2) if env is None else env(), **kwargs).learn(40)
    model.save(tmp_path / "model")
    loaded = BootDQN.load(tmp_path / "model")
    saved, restored = model.policy.state_dict(), loaded.policy.state_dict()
    assert all(th.equal(saved[name], restored[name]) for name in saved)
    obs = model.get_env().reset()
    assert np.array_equal(model.member_values(obs), loaded.member_values(obs))
    again = BootDQN.load(tmp_path / "model", env=model.get_env(), policy_kwargs=model.policy_kwargs)
    assert again.learn(20)._n_updates > model._n_updates
    model.policy.save(tmp_path / "policy")
    policy_alone: Any = type(model.policy).load(tmp_path / "policy")
    assert np.array_equal(policy_alone.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])


def test_load_in_a_new_process(tmp_path: Path) -> None:
    model = tiny().learn(64)
    model.save(tmp_path / "model")
    np.save(tmp_path / "values.npy", model.member_values(np.eye(100, dtype=np.float32)))
    code = f"""
import numpy as np
from sb3_ben import BootDQN
model, obs = BootDQN.load({str(tmp_path / "model")!r}), np.eye(100, dtype=np.float32)
expected = np.load({str(tmp_path / "values.npy")!r})
assert np.array_equal(model.member_values(obs), expected)
assert np.array_equal(model.predict(obs, deterministic=True)[0], expected.mean(axis=0).argmax(axis=-1))
assert (model.n_members, model.prior_scale, model.mask_probability) == (4, 3.0, 0.5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_same_seed_same_run() -> None:
    runs = [tiny(env=make_vec("DeepSea-v0", 2, seed=1), seed=5).learn(100) for _ in range(2)]
    one, other = (state_of(model.policy) for model in runs)
    assert all(th.equal(one[name], other[name]) for name in one)
    assert np.array_equal(runs[0].replay_buffer.masks, runs[1].replay_buffer.masks)


def test_load_with_another_number_of_environments(tmp_path: Path) -> None:
    tiny(env=make_vec("DeepSea-v0", 3)).learn(30).save(tmp_path / "model")
    model = BootDQN.load(tmp_path / "model", env=make_vec("DeepSea-v0", 2))
    model.learn(20, reset_num_timesteps=False)
    assert model.active_members is not None
    assert model.active_members.shape == (2,)


def test_callbacks_schedules_and_logs(tmp_path: Path) -> None:
    venv = VecMonitor(make_vec("DeepSea-v0", 2))
    model = tiny(env=venv, learning_rate=lambda progress: 1e-3 * progress, tensorboard_log=str(tmp_path))
    evaluation = EvalCallback(VecMonitor(make_vec("DeepSea-v0", 1)), eval_freq=20, n_eval_episodes=2, verbose=0)
    checkpoints = CheckpointCallback(20, str(tmp_path / "saved"), save_replay_buffer=True)
    model.learn(100, callback=[evaluation, checkpoints])
    assert len(list((tmp_path / "saved").glob("*.zip"))) == 2
    assert len(list(tmp_path.glob("BootDQN_1/events*"))) == 1
    logged = model.logger.name_to_value
    assert {"train/loss", "train/n_updates", "train/learning_rate", "uncertainty/epistemic"} <= set(logged)
    assert logged["uncertainty/epistemic"] > 0
    assert logged["train/learning_rate"] < 1e-3


def test_vec_normalize() -> None:
    venv = VecNormalize(make_vec_env("CartPole-v1", 2, seed=0), clip_obs=0.5)
    model = tiny(env=venv).learn(64)
    assert abs(model.replay_buffer.observations).max() > 0.5  # the buffer keeps what the environment said
    assert abs(model.replay_buffer.sample(64, env=venv).observations).max() <= 0.5


def test_a_single_member_and_other_optimisers() -> None:
    model = tiny(n_members=1, policy_kwargs={"optimizer_class": th.optim.SGD, "net_arch": []}).learn(64)
    assert isinstance(model.policy.optimizer, th.optim.SGD)
    assert model.logger.name_to_value["uncertainty/epistemic"] == 0


def test_features_extractor_with_statistics() -> None:
    """The target network and the priors stay in evaluation mode, whatever is trained."""
    model = tiny()
    model.policy.set_training_mode(True)
    assert model.q_net.training
    assert not model.q_net.prior.training
    assert not model.q_net_target.training


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_members": 0}, "n_members"),
        ({"n_members": 2.5}, "n_members"),
        ({"prior_scale": -1.0}, "prior_scale"),
        ({"prior_scale": float("nan")}, "prior_scale"),
        ({"prior_scale": float("inf")}, "prior_scale"),
        ({"mask_probability": 0.0}, "mask_probability"),
        ({"mask_probability": 1.1}, "mask_probability"),
        ({"policy_kwargs": {"n_members": 3}}, "policy_kwargs"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**kwargs)


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(AssertionError, match="Discrete"):
        BootDQN("MlpPolicy", "Pendulum-v1")


def test_hyperparameters_are_arguments() -> None:
    known = {*inspect.signature(BootDQN.__init__).parameters, "n_timesteps", "n_envs", "env_wrapper", "normalize"}
    entries = yaml.safe_load((HYPERPARAMS / "bootdqn.yml").read_text())
    assert {"default", "DeepSea-v0", "Tiger-v0", "CartPole-v1"} <= set(entries)
    for env_id, entry in entries.items():
        assert set(entry) <= known, env_id


# ---------------------------------------------------------------------- learning


def test_finds_the_treasure_where_greed_does_not() -> None:
    """Deep sea of size 5: a random episode succeeds once in 32, and the rewards before the treasure advise to go left."""
    found: list[int] = []

    def remember(local: dict[str, Any], _: dict[str, Any]) -> bool:
        found.extend(info["is_success"] for done, info in zip(local["dones"], local["infos"], strict=True) if done)
        return True

    settings = {**tuned("bootdqn", "DeepSea-v0"), "n_members": 10, "batch_size": 64, "learning_starts": 20}
    venv = make_vec("DeepSea-v0", settings.pop("n_envs"), size=5)
    model = BootDQN(env=venv, seed=0, **settings).learn(5 * 200, callback=remember)
    assert sum(found[:20]) < 10
    assert sum(found[-20:]) >= 15
    assert np.isclose(evaluate_policy(model, make_vec("DeepSea-v0", 1, size=5), 1, warn=False)[0], 0.99)
