"""BEN as a citizen of Stable-Baselines3."""

import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv, SimpleMultiObsEnv
from stable_baselines3.common.evaluation import evaluate_policy as sb3_evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize

from benchmarks.common import tuned
from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.ben.learning import BellmanSamples, Seen, bellman_samples, stands_for, transitions
from sb3_ben.ben.objectives import msbbe_semi
from sb3_ben.ben.paper import PaperBEN
from sb3_ben.ben.policies import BENPolicy
from sb3_ben.envs.tiger import LISTEN
from sb3_ben.flows.units import RunningStandardizer
from sb3_ben.history.previous_reward import VecPreviousReward, attach_reward, previous_reward
from sb3_ben.history.samples import Observed

TINY: dict[str, Any] = {
    "learning_starts": 16,
    "batch_size": 4,
    "sequence_length": 5,
    "buffer_size": 500,
    "target_update_interval": 100,
    "n_phi_samples": 2,
    "policy_kwargs": {"net_arch": [8], "rnn_hidden_size": 8, "phi_dim": 6},
    "seed": 0,
}
POLICIES = ["MlpLstmPolicy", "MlpGruPolicy", "MlpPolicy"]


def tiny(policy: str = "MlpLstmPolicy", env: Any = "Tiger-v0", **kwargs: Any) -> Any:
    policy_kwargs = {**TINY["policy_kwargs"], **kwargs.pop("policy_kwargs", {})}
    return kwargs.pop("cls", BEN)(policy, env, **{**TINY, **kwargs, "policy_kwargs": policy_kwargs})


def parameters_of(model: BEN) -> list[np.ndarray]:
    return [value.detach().numpy().copy() for value in model.policy.state_dict().values()]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_learn_predict_save_load(policy: str, n_envs: int, tmp_path: Path) -> None:
    model = tiny(policy, make_vec("Tiger-v0", n_envs)).learn(64)
    model.save(tmp_path / "model")
    loaded = BEN.load(tmp_path / "model")
    assert same(parameters_of(model), parameters_of(loaded))
    obs: Any = VecPreviousReward(make_vec("Tiger-v0", 2, seed=0)).reset()
    one: Any
    for one in (model, loaded):
        actions, _ = one.predict(obs, deterministic=True)
        assert actions.shape == (2,)
        single, _ = one.predict(np.array(0), deterministic=True)
        assert isinstance(single, np.ndarray)
        assert single.shape == ()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"bellman": "point"},
        {"replay_buffer_kwargs": {"warm_up": 0}},
        {"n_steps": 3},
        {"policy_kwargs": {"rnn_type": "linear", "rnn_kwargs": {"max_time": 3.0}}},
        {"exploration": "greedy"},
        {"exploration": "spread"},
        {"exploration": "posterior"},
        {"n_posterior_steps": 3},
        {"n_pretrain_steps": 3},
        {"gradient_steps": -1, "train_freq": 2},
        {"policy_kwargs": {"n_rnn_layers": 2, "net_arch": []}},
    ],
)
def test_options(kwargs: dict[str, Any]) -> None:
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 4), **kwargs)
    before = [values.clone() for values in model.q_net.parameters()]
    model.learn(160)
    assert model._n_updates > 0
    assert not any(th.equal(old, new) for old, new in zip(before, model.q_net.parameters(), strict=True))
    assert all(np.isfinite(values).all() for values in parameters_of(model))


def test_train_freq_in_episodes() -> None:
    model = tiny(train_freq=(2, "episode")).learn(64)
    assert model._n_updates > 0


@pytest.mark.parametrize("rnn_type", ["lstm", "gru", "linear", "none"])
@pytest.mark.parametrize("n_rnn_layers", [1, 2])
def test_every_memory_for_vectors_images_and_dicts(rnn_type: str, n_rnn_layers: int) -> None:
    memory = {"rnn_type": rnn_type, "n_rnn_layers": n_rnn_layers}
    image = FakeImageEnv(screen_height=40, screen_width=40, n_channels=3, discrete=True)
    models = [
        tiny("MlpLstmPolicy", "CartPole-v1", policy_kwargs=memory),
        tiny("CnnLstmPolicy", image, policy_kwargs={**memory, "features_extractor_kwargs": {"features_dim": 8}}),
        tiny("MultiInputLstmPolicy", SimpleMultiObsEnv(random_start=True, channel_last=True), policy_kwargs=memory),
    ]
    for model in models:
        model.learn(40)
        assert model._n_updates > 0
        obs, state, starts = model.get_env().reset(), None, np.ones(1, dtype=bool)
        for _ in range(5):
            actions, state = model.predict(obs, state, starts)
            obs, _, starts, _ = model.get_env().step(actions)
        assert state is not None
        assert all(np.isfinite(part).all() for part in state)


def test_evaluation_under_a_normalizer_of_its_own() -> None:
    """Observations and rewards are normalised in training, and in evaluation observations alone, with the same statistics."""
    venv: Any = VecNormalize(VecMonitor(make_vec("SearchAndRescue5x5-v0", 2, seed=0)))
    others: Any = VecNormalize(VecMonitor(make_vec("SearchAndRescue5x5-v0", 2, seed=1)), training=False, norm_reward=False)
    evaluation = EvalCallback(others, eval_freq=20, n_eval_episodes=2, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny(env=venv).learn(80, callback=evaluation)
        assert np.array_equal(others.obs_rms.mean, venv.obs_rms.mean)
        mean, _ = sb3_evaluate_policy(model, model.get_env(), 2)
    assert np.isfinite([mean, evaluation.last_mean_reward]).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", ["constant", "spikes", "noise"])
@pytest.mark.parametrize("bellman", ["flow", "point"])
def test_rewards_of_any_size_give_finite_numbers(scale: float, kind: str, bellman: str) -> None:
    class Rewards(gym.Env):
        observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
            super().reset(seed=seed)
            self.t = 0
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
            self.t += 1
            spike = -500.0 if self.np_random.random() < 0.1 else 10.0
            reward = {"constant": 1.0, "spikes": spike, "noise": self.np_random.normal()}[kind]
            return self.t % 2, scale * reward, self.t == 7, False, {}

    model = tiny(env=Rewards(), bellman=bellman, max_grad_norm=10.0).learn(150)
    assert all(np.isfinite(values).all() for values in parameters_of(model))
    if bellman == "flow":
        assert all(np.isfinite(part).all() for part in model.bellman_distribution(0))


# ---------------------------------------------------------------------- memory


def test_stepwise_predict_equals_one_pass_over_the_stored_sequence() -> None:
    for policy in POLICIES:
        model = tiny(policy, make_vec("Tiger-v0", 3, seed=0), buffer_size=3000, sequence_length=11).learn(99)
        histories = model.replay_buffer.sample(16)
        with th.no_grad():
            expected = model.policy.encode(histories.observed).encoding.q_values
            memory = model.policy.initial_memory(16)
            for t in range(len(expected)):
                starts = histories.previous_actions[t] < 0
                memory = memory._replace(actions=histories.previous_actions[t])
                assert isinstance(histories.observations, th.Tensor)
                now = model.policy.step(histories.observations[t], memory, histories.previous_rewards[t], starts)
                memory = memory._replace(hidden=now.hidden)
                th.testing.assert_close(now.encoding.q_values, expected[t])


def test_a_reset_in_the_middle_of_a_batch_equals_a_fresh_state() -> None:
    model = tiny().learn(40)
    observe = lambda *values: attach_reward(np.array(values), np.full(len(values), -1.0, dtype=np.float32))  # noqa: E731
    _, state = model.predict(observe(1, 2), deterministic=True)
    _, mixed = model.predict(observe(1, 1), state, np.array([False, True]), deterministic=True)
    _, fresh = model.predict(observe(1, 1), deterministic=True)
    _, kept = model.predict(observe(1, 1), state, deterministic=True)
    assert mixed is not None
    assert fresh is not None
    assert kept is not None
    for a, b, c in zip(mixed[:-1], fresh[:-1], kept[:-1], strict=True):
        assert np.allclose(a[:, 1], b[:, 1], atol=1e-6)
        assert np.allclose(a[:, 0], c[:, 0], atol=1e-6)
        assert not np.allclose(a[:, 0], b[:, 0], atol=1e-6)


def test_memory_in_training_is_that_of_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agent remembers while it collects is what predict gives on the same history, random actions included."""
    monkeypatch.setattr(RunningStandardizer, "update", lambda *args: None)  # or the units of rewards would have moved on since
    model = tiny(env=make_vec("Tiger-v0", 2, seed=1), learning_starts=1000, buffer_size=1000).learn(32)
    buffer = model.replay_buffer
    state: Any = None
    for t in range(16):
        rewards = buffer.rewards[t - 1] if t else np.zeros(2, dtype=np.float32)
        observations = attach_reward(buffer.observations[t, :, 0], rewards)
        _, state = model.predict(observations, state, buffer.episode_starts[t], deterministic=True)
        state = model.policy.with_actions(state, buffer.actions[t, :, 0])
    for ours, theirs in zip(model._memory, state, strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)


def test_evaluation_leaves_training_unchanged() -> None:
    class Evaluate(BaseCallback):
        def _on_step(self) -> bool:
            evaluate_policy(self.model, make_vec("Tiger-v0", 2, seed=3), 4, deterministic=True, warn=False)
            return True

    plain = tiny(env=make_vec("Tiger-v0", 2)).learn(80)
    evaluated = tiny(env=make_vec("Tiger-v0", 2)).learn(80, callback=Evaluate())
    assert same(parameters_of(plain), parameters_of(evaluated))


def test_same_seed_same_model() -> None:
    first, second, other = (parameters_of(tiny(env=make_vec("Tiger-v0", 2), seed=seed).learn(80)) for seed in (1, 1, 2))
    assert same(first, second)
    assert not same(first, other)


# ---------------------------------------------------------------------- previous rewards


def test_previous_reward_wrapper() -> None:
    venv = VecPreviousReward(make_vec("Tiger-v0", 2, seed=0))
    obs = venv.reset()
    assert previous_reward(obs) is not None
    assert np.array_equal(previous_reward(obs), [0, 0])  # type: ignore[arg-type]
    obs, rewards, _, _ = venv.step(np.array([2, 2]))
    assert np.array_equal(previous_reward(obs), rewards)  # type: ignore[arg-type]
    assert isinstance(obs, np.ndarray)
    for derived in (obs[:1], obs.copy(), obs + 0, np.array(obs), pickle.loads(pickle.dumps(obs[:1]))):
        assert previous_reward(derived) is None  # rewards attached to other rows would be worse than none
    assert np.array_equal(previous_reward(pickle.loads(pickle.dumps(obs))), rewards)  # type: ignore[arg-type]


def test_original_reward_under_vec_normalize() -> None:
    venv = VecPreviousReward(VecNormalize(make_vec("Tiger-v0", 2, seed=0), norm_obs=False, norm_reward=True))
    venv.reset()
    for _ in range(3):
        obs, _, _, _ = venv.step(np.array([2, 2]))
    assert np.array_equal(previous_reward(obs), [-1, -1])  # type: ignore[arg-type]


def test_raw_evaluation_warns_once_and_own_evaluation_is_exact() -> None:
    model = tiny().learn(60)
    with pytest.warns(UserWarning, match=r"sb3_ben\.evaluate_policy"):
        sb3_evaluate_policy(model, gym.make("Tiger-v0"), 2, warn=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb3_evaluate_policy(model, gym.make("Tiger-v0"), 2, warn=False)
        evaluate_policy(model, gym.make("Tiger-v0"), 2, warn=False)


def test_lost_tags_are_noticed() -> None:
    """A wrapper outside that copies observations loses the reward: the mean is used, with a warning."""
    venv: Any = VecFrameStack(VecPreviousReward(make_vec("SearchAndRescue5x5-v0", 1)), 1)
    model = tiny(env=make_vec("SearchAndRescue5x5-v0", 1, seed=0)).learn(60)
    obs = venv.reset()
    _, state = model.predict(obs)
    obs, *_ = venv.step(np.array([4]))
    with pytest.warns(UserWarning, match="no previous reward"):
        model.predict(obs, state)


def test_eval_callbacks_get_the_wrapper_wherever_they_hide(tmp_path: Path) -> None:
    def evaluation(eval_freq: int) -> EvalCallback:
        return EvalCallback(VecMonitor(make_vec("Tiger-v0", 2)), eval_freq=eval_freq, n_eval_episodes=2, verbose=0)

    nested, plain = evaluation(1), evaluation(16)
    checkpoint = CheckpointCallback(30, str(tmp_path), save_replay_buffer=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny(env=VecMonitor(make_vec("Tiger-v0", 2))).learn(80, callback=[EveryNTimesteps(20, nested), plain, checkpoint])
    assert isinstance(nested.eval_env, VecPreviousReward)
    assert isinstance(plain.eval_env, VecPreviousReward)
    assert np.isfinite([plain.last_mean_reward, nested.last_mean_reward]).all()
    assert list(tmp_path.glob("*replay_buffer*"))


# ---------------------------------------------------------------------- what the user sees


def test_bellman_distribution() -> None:
    model = tiny(env=make_vec("Tiger-v0", 2)).learn(80)
    obs = model.get_env().reset()
    beliefs = model.bellman_distribution(obs, n_samples=2000)
    assert beliefs.mean.shape == beliefs.epistemic_std.shape == beliefs.aleatoric_std.shape == (2, 3)
    assert beliefs.samples.shape == (2, 3, 2000)
    total = np.sqrt(beliefs.epistemic_std**2 + beliefs.aleatoric_std**2)
    assert np.allclose(beliefs.samples.mean(-1), beliefs.mean, atol=6 * total.max() / np.sqrt(2000))
    assert np.allclose(beliefs.samples.std(-1), total, rtol=0.25)
    assert model.bellman_distribution(0).mean.shape == (3,)
    with pytest.raises(ValueError, match="point"):
        tiny(bellman="point").bellman_distribution(0)


def test_logs() -> None:
    logged: dict[str, Any] = {}

    class Peek(BaseCallback):
        def _on_step(self) -> bool:
            logged.update(self.logger.name_to_value)
            return True

    tiny(env=VecMonitor(make_vec("Tiger-v0", 2))).learn(120, callback=Peek(), log_interval=10_000)
    expected = {"train/elbo", "train/msbbe", "train/kl", "train/loss", "train/n_updates", "train/learning_rate"}
    expected |= {"train/posterior_learning_rate", "uncertainty/epistemic", "uncertainty/aleatoric", "rollout/exploration_rate"}
    assert expected <= set(logged)
    assert all(np.isfinite(logged[name]) for name in expected)


def test_learn_has_a_default_and_actions_may_start_elsewhere() -> None:
    import inspect

    assert inspect.signature(BEN.learn).parameters["total_timesteps"].default == 100_000

    class Shifted(gym.ActionWrapper):
        def __init__(self, env: gym.Env) -> None:
            super().__init__(env)
            self.action_space = spaces.Discrete(3, start=4)

        def action(self, action: Any) -> Any:
            assert 4 <= action < 7
            return action - 4

    model = tiny(env=Shifted(gym.make("Tiger-v0"))).learn(60)
    assert model.predict(0)[0] in (4, 5, 6)


def test_set_env_starts_new_episodes() -> None:
    model = tiny(env=make_vec("Tiger-v0", 1, seed=0)).learn(24)
    model.set_env(make_vec("Tiger-v0", 1, seed=5))
    model.learn(24, reset_num_timesteps=False)
    assert model.replay_buffer.episode_starts[:48, 0].nonzero()[0].tolist() == [0, 11, 22, 24, 35, 46]


@pytest.mark.parametrize("algorithm", [BEN, PaperBEN])
def test_other_number_of_envs_after_loading(algorithm: type[BEN], tmp_path: Path) -> None:
    tiny(env=make_vec("Tiger-v0", 4), cls=algorithm).learn(80).save(tmp_path / "model")
    algorithm.load(tmp_path / "model", env=make_vec("Tiger-v0", 2)).learn(60)


def test_buffer_of_another_number_of_envs_is_refused(tmp_path: Path) -> None:
    model = tiny(env=make_vec("Tiger-v0", 4)).learn(40)
    model.save_replay_buffer(tmp_path / "buffer")
    other = tiny(env=make_vec("Tiger-v0", 2))
    other.load_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match="replay buffer holds 4"):
        other.learn(20)


def test_policy_save_load(tmp_path: Path) -> None:
    for policy in POLICIES:
        model = tiny(policy).learn(40)
        model.policy.save(str(tmp_path / "policy"))
        loaded = type(model.policy).load(str(tmp_path / "policy"))
        assert isinstance(loaded, BENPolicy)
        assert np.array_equal(loaded.predict(np.array([0, 1]))[0], model.policy.predict(np.array([0, 1]))[0])


# ---------------------------------------------------------------------- exact resume


class SaveInTheMiddle(BaseCallback):
    """Save model, buffer and environment after a given number of steps."""

    def __init__(self, at: int, folder: Path) -> None:
        super().__init__()
        self.at, self.folder = at, folder

    def _on_step(self) -> bool:
        if self.num_timesteps == self.at:
            assert isinstance(self.model, BEN)
            self.model.save(self.folder / "model")
            self.model.save_replay_buffer(self.folder / "buffer")
            (self.folder / "env").write_bytes(pickle.dumps(self.training_env.unwrapped))
        return True


RESUME = """
import pickle, sys, pathlib, numpy as np
from sb3_ben.ben import ben, paper
folder = pathlib.Path(sys.argv[1])
algorithm = {"BEN": ben.BEN, "PaperBEN": paper.PaperBEN}[sys.argv[3]]
model = algorithm.load(folder / "model", env=pickle.loads((folder / "env").read_bytes()), force_reset=False)
model.load_replay_buffer(folder / "buffer")
model.learn(int(sys.argv[2]), reset_num_timesteps=False)
np.savez(folder / "after.npz", *[v.numpy() for v in model.policy.state_dict().values()], actions=model.replay_buffer.actions)
"""


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"cls": PaperBEN},
        {"exploration": "posterior", "gradient_steps": 2},
        {"policy_kwargs": {"averaging": 0.9}},
    ],
)
def test_resume_in_a_new_process_is_exact(kwargs: dict[str, Any], tmp_path: Path) -> None:
    """Saved in the middle of an episode and of a rollout, loaded elsewhere: bit for bit the uninterrupted run."""
    model = tiny("MlpLstmPolicy", make_vec("Tiger-v0", 2), train_freq=3, **kwargs)
    model.learn(140, callback=SaveInTheMiddle(74, tmp_path))
    subprocess.run([sys.executable, "-c", RESUME, str(tmp_path), "66", type(model).__name__], check=True)
    resumed = np.load(tmp_path / "after.npz")
    assert np.array_equal(resumed["actions"], model.replay_buffer.actions)
    for i, value in enumerate(parameters_of(model)):
        assert np.array_equal(resumed[f"arr_{i}"], value), list(model.policy.state_dict())[i]


def test_a_loaded_model_can_be_saved_before_it_goes_on(tmp_path: Path) -> None:
    model = tiny("MlpLstmPolicy", make_vec("Tiger-v0", 2), train_freq=3, cls=PaperBEN)
    model.learn(140, callback=SaveInTheMiddle(74, tmp_path))
    copied = RESUME.replace("model.load_replay_buffer", 'model.save(folder / "model.zip")\nmodel.load_replay_buffer')
    assert copied != RESUME
    for _ in range(2):  # from the copy that the first of them makes, as well
        subprocess.run([sys.executable, "-c", copied, str(tmp_path), "66", type(model).__name__], check=True)
        resumed = np.load(tmp_path / "after.npz")
        assert all(np.array_equal(resumed[f"arr_{i}"], value) for i, value in enumerate(parameters_of(model)))


@pytest.mark.parametrize(
    ("save", "load", "name"), [("save", "load", "m.zip"), ("save_replay_buffer", "load_replay_buffer", "b.pkl")]
)
def test_what_was_saved_survives_a_kill_while_saving(
    save: str, load: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = tiny().learn(40), tmp_path / name
    getattr(model, save)(path)

    def die(*args: Any, **kwargs: Any) -> None:
        path.with_name(f"{name}.unfinished").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr("stable_baselines3.common.base_class.save_to_zip_file", die)
    monkeypatch.setattr("stable_baselines3.common.off_policy_algorithm.save_to_pkl", die)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, save)(path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    getattr(model, load)(path)


def test_windows_of_replay_can_be_changed_on_loading(tmp_path: Path) -> None:
    tiny(sequence_length=5).learn(20).save(tmp_path / "model")
    loaded = BEN.load(tmp_path / "model", env=make_vec("Tiger-v0", 1), sequence_length=9)
    assert (loaded.replay_buffer.sequence_length, loaded.replay_buffer.warm_up) == (9, 4)


def test_a_buffer_of_the_past_is_not_joined_to_the_running_episode(tmp_path: Path) -> None:
    model = tiny(env=make_vec("Tiger-v0", 2, seed=0), learning_starts=1000, buffer_size=1000).learn(30)
    model.save_replay_buffer(tmp_path / "buffer")
    for is_past in (False, True):  # after the second loading, what the buffer ends with was some steps ago
        model.load_replay_buffer(tmp_path / "buffer")
        row = model.replay_buffer.pos
        model.learn(2, reset_num_timesteps=False)
        assert (model.replay_buffer.episode_starts[row] == is_past).all()


def test_pretraining_takes_the_learning_rate_of_the_flows() -> None:
    model = tiny(learning_rate=1e-3).pretrain(1)
    assert model.policy.posterior_optimizer.param_groups[0]["lr"] == pytest.approx(3e-3)


def test_without_flows_and_prior_there_is_nothing_to_pretrain_on() -> None:
    with pytest.raises(ValueError, match="nothing to pre-train on"):
        tiny(bellman="point").pretrain(1)


def test_predict_acts_by_averaged_weights(tmp_path: Path) -> None:
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), policy_kwargs={"averaging": 0.9})
    expected: list[th.Tensor] = []

    class Average(BaseCallback):
        """The average as it is defined, from the weights after every gradient step."""

        def _on_rollout_start(self) -> None:
            latest = [part.detach().clone() for part in model.q_net.parameters()]
            n = model._n_updates
            if n == 1:
                expected.extend(latest)
            elif n > 1:
                share = max(0.1, 1 / (1 + (n - 1) / 10))
                expected[:] = [(1 - share) * old + share * new for old, new in zip(expected, latest, strict=True)]

        def _on_step(self) -> bool:
            return True

    watcher = Average()
    model.learn(1000, watcher)
    watcher._on_rollout_start()  # after the last update
    average = model.policy.q_net_average
    assert model.policy.acting_net is average
    assert model._n_updates > 100
    for one, other in zip(expected, average.parameters(), strict=True):
        assert th.allclose(one, other, atol=1e-5)
    with th.no_grad():  # what the latest weights say does not count
        for part in model.q_net.parameters():
            part.zero_()
    obs: Any = VecPreviousReward(make_vec("Tiger-v0", 2, seed=0)).reset()
    encoding = model.policy.recall(obs, None, None).encoding
    assert encoding.q_values.abs().min() > 0
    th.manual_seed(0)
    beliefs = model.bellman_distribution(obs).aleatoric_std  # of the flow that belongs to these encodings
    with th.no_grad():
        for part in model.policy.aleatoric.parameters():
            part.fill_(0.5)
    th.manual_seed(0)
    assert np.array_equal(model.bellman_distribution(obs).aleatoric_std, beliefs)
    model.save(tmp_path / "model")
    assert same(parameters_of(model), parameters_of(BEN.load(tmp_path / "model")))
    with pytest.raises(ValueError, match="averaging"):
        tiny(policy_kwargs={"averaging": 1.0})


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    tiny().learn(30).save(tmp_path / "model.zip")
    content = (tmp_path / "model.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.zip").write_text("not a model")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    (tmp_path / "flipped.zip").write_bytes(bytes(flipped))
    DQN("MlpPolicy", "CartPole-v1", learning_starts=0, buffer_size=10).save(tmp_path / "dqn.zip")
    for name, message in (
        ("cut", "not a complete"),
        ("text", "not a complete"),
        ("flipped", "damaged"),
        ("dqn", "not saved by BEN"),
    ):
        with pytest.raises(ValueError, match=message):
            BEN.load(tmp_path / f"{name}.zip")
    with pytest.raises(FileNotFoundError):
        BEN.load(tmp_path / "nothing")
    BEN.load(io.BytesIO(content))


# ---------------------------------------------------------------------- errors


def test_action_gap_lowers_the_samples_of_other_actions() -> None:
    model = tiny().learn(64)
    histories, policy = model.replay_buffer.sample(8), model.policy
    encoding = policy.encode(histories.observed).encoding

    def samples(**kwargs: float) -> BellmanSamples:
        return bellman_samples(policy, histories, encoding, model.rule._replace(**kwargs))

    with th.no_grad():
        values = model.q_net_target.evaluate(policy.history_input(model.q_net_target, histories.observed)).q_values
    best, chosen = values[:-1].max(dim=-1).values, values[:-1].gather(-1, histories.actions[..., None])[..., 0]
    lacks = (best - chosen) * policy.bellman_units.std
    plain, lowered = samples(), samples(action_gap=0.5)
    assert th.equal(plain.b, lowered.b)  # the density of b is that of what is received
    assert not plain.gaps.any()
    assert th.allclose(lowered.gaps, 0.5 * lacks, atol=1e-4)
    assert lowered.gaps.any()
    limited = samples(action_gap=0.5, action_gap_limit=lacks.max().item() / 2)
    assert th.allclose(limited.gaps, 0.5 * lacks.clamp(max=lacks.max() / 2), atol=1e-4)


@pytest.mark.parametrize("bellman", ["flow", "point"])
def test_action_gap_lowers_what_q_learns_and_not_what_the_flow_does(bellman: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(bellman=bellman, action_gap=0.5).learn(64)
    batch = model.operator.evaluate(model.replay_buffer.sample(8), model.rule, model.seen)
    unit = model.policy.bellman_units.std
    targets = []

    def remember(q: th.Tensor, target: th.Tensor, mask: th.Tensor) -> th.Tensor:
        targets.append(target)
        return msbbe_semi(q, target, mask)

    monkeypatch.setattr("sb3_ben.ben.learning.msbbe_semi", remember)
    densities = []
    for one in (batch, batch._replace(gaps=th.zeros_like(batch.gaps))):
        th.manual_seed(0)
        densities.append(model.operator.losses(one).logs.get("train/elbo"))
    assert th.allclose(targets[1] - targets[0], batch.gaps / unit, atol=1e-5)
    assert densities[0] == densities[1]


def test_what_follows_a_time_limit_is_worth_no_more_than_what_is_learned_of() -> None:
    """The last observation of an episode that was cut off: there Q is extrapolation, however far."""

    class Walk(gym.Env):
        observation_space, action_space = spaces.Box(-1000, 1000, (1,), dtype=np.float32), spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            self.t = 0
            return np.zeros(1, dtype=np.float32), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
            self.t += 1
            last = self.t == 5
            return np.full(1, 1000.0 if last else self.t, dtype=np.float32), 1.0, False, last, {}

    model = tiny("MlpPolicy", Walk(), learning_starts=1000).learn(50)
    policy, histories = model.policy, model.replay_buffer.sample(16)
    with th.no_grad():
        q_values = policy.encode(histories.observed).encoding.q_values.amax(dim=-1)
    unit = policy.bellman_units
    assert histories.cuts is not None
    assert histories.cuts.any()
    assert not histories.dones.any()
    assert (histories.mask[histories.cuts.bool()] > 0).all()  # the last transition counts
    known = q_values[:-1][histories.mask > 0]
    assert q_values[1:][histories.cuts.bool()].abs().max() > 5 * known.abs().max()
    b = bellman_samples(policy, histories, policy.encode(histories.observed).encoding, model.rule).b
    limits = 1 + model.gamma * unit.unstandardize(th.stack([known.min(), known.max()]))
    assert limits[0] - 1e-4 <= b[histories.mask > 0].min()
    assert b[histories.mask > 0].max() <= limits[1] + 1e-4


def test_the_posterior_counts_all_transitions_seen() -> None:
    model = tiny(env=make_vec("Tiger-v0", 2), buffer_size=40).learn(400)
    assert model.replay_buffer.size() * 2 == 40
    assert model.seen == (400, 0)
    batch = model.operator.evaluate(model.replay(4), model.rule, model.seen)
    assert batch.counts.sum().item() == pytest.approx(400)


def test_real_transitions_stand_for_real_ones_and_simulated_for_simulated_ones() -> None:
    model = tiny(env=make_vec("Tiger-v0", 2)).learn(80)
    histories = model.replay(8)._replace(n_simulated=6)
    counts = stands_for(histories, Seen(80, 10_000))
    assert counts[:, :2].sum().item() == pytest.approx(80)
    assert counts[:, 2:].sum().item() == pytest.approx(10_000)
    assert th.equal(counts > 0, histories.mask > 0)


def test_chance_is_reported_without_the_blur_of_training() -> None:
    """A world in which nothing is left to chance: only the noise on b would be seen in the flow's variance."""
    env = DummyVecEnv([lambda: IdentityEnv(dim=2, ep_length=10)])
    kwargs: dict[str, Any] = {"gamma": 0.0, "learning_rate": 3e-3, "batch_size": 32, "sequence_length": 1, "train_freq": 1}
    model = BEN("MlpPolicy", env, learning_starts=64, seed=0, **kwargs).learn(800)
    unit = float(model.policy.bellman_units.std)
    chance = model.bellman_distribution(np.array([0, 1])).aleatoric_std / unit
    assert chance.mean() < 0.12  # 0.3 is the noise itself


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"bellman": "line"}, "bellman"),
        ({"exploration": "boltzmann"}, "exploration"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"replay_buffer_kwargs": {"warm_up": -1}}, "warm_up"),
        ({"n_posterior_steps": 0}, "n_posterior_steps"),
        ({"n_pretrain_steps": -1}, "n_pretrain_steps"),
        ({"n_phi_samples": 0}, "n_phi_samples"),
        ({"batch_size": 0}, "batch_size"),
        ({"gamma": 1.5}, "gamma"),
        ({"tau": -0.1}, "tau"),
        ({"exploration_final_eps": 2.0}, "exploration_final_eps"),
        ({"action_gap": 1.0}, "action_gap"),
        ({"action_gap_limit": 0.0}, "action_gap_limit"),
        ({"policy_kwargs": {"rnn_type": "transformer"}}, "rnn_type"),
        ({"policy_kwargs": {"phi_dim": 0}}, "phi_dim"),
        ({"policy_kwargs": {"n_rnn_layers": 0}}, "n_rnn_layers"),
        ({"policy_kwargs": {"rnn_type": "linear", "rnn_hidden_size": 0}}, "rnn_hidden_size"),
        ({"policy_kwargs": {"rnn_type": "linear", "rnn_kwargs": {"max_time": 0.0}}}, "max_time"),
        ({"policy_kwargs": {"rnn_kwargs": {"bidirectional": True}}}, "bidirectional"),
        ({"policy_kwargs": {"prior_spread": -1.0}}, "prior_spread"),
        ({"policy_kwargs": {"prior_spread": np.nan}}, "prior_spread"),
        ({"train_freq": 0}, "train_freq"),
        ({"train_freq": (0, "episode")}, "train_freq"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"sequence_length": 2.5}, "sequence_length"),
        ({"n_steps": 0}, "n_steps"),
        ({"gradient_steps": 1.5}, "gradient_steps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": np.nan}, "max_grad_norm"),
        ({"learning_rate": -1e-3}, "learning_rate"),
        ({"bellman": "point", "exploration": "posterior"}, "exploration"),
    ],
)
def test_impossible_arguments(kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tiny(**kwargs)


def test_wrong_spaces() -> None:
    with pytest.raises(AssertionError, match=r"action space.*ActionWrapper"):
        BEN("MlpLstmPolicy", "Pendulum-v1")
    with pytest.raises(AssertionError, match=r"action space.*ActionWrapper"):
        tiny(env=Broken("nothing", action_space=spaces.MultiDiscrete([2, 2])))
    nested = spaces.Dict({"inner": spaces.Dict({"x": spaces.Discrete(2)})})
    with pytest.raises(NotImplementedError, match="FlattenObservation"):
        tiny(env=Broken("nothing", observation_space=nested))
    with pytest.raises(ValueError, match="MultiInputLstmPolicy"):
        tiny("MlpLstmPolicy", SimpleMultiObsEnv())
    with pytest.raises(ValueError, match="MlpLstmPolicy"):
        tiny("MultiInputLstmPolicy", "CartPole-v1")


class Broken(gym.Env):
    """Returns something that is not finite after a few steps, at once, or when its episode is cut off."""

    def __init__(self, what: str, observation_space: Any = None, action_space: Any = None) -> None:
        self.what = what
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,), dtype=np.float32)
        self.action_space = action_space or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return np.full(2, np.nan if self.what == "first observation" else 0.0, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        bad = self.t > 3
        obs = np.full(2, np.nan if bad and self.what in ("observation", "last observation") else 0.0, dtype=np.float32)
        ends = bad and self.what == "last observation"
        return obs, float("inf") if bad and self.what == "reward" else 0.0, False, ends, {}


@pytest.mark.parametrize("bellman", ["flow", "point"])
@pytest.mark.parametrize("what", ["observation", "first observation", "last observation", "reward"])
def test_numbers_that_are_not_finite_are_refused_at_once(what: str, bellman: str) -> None:
    model = tiny(env=DummyVecEnv([lambda: Broken(what)]), bellman=bellman)
    with pytest.raises(ValueError, match=f"{what.removeprefix('first ')}.*not finite"):
        model.learn(50)
    assert model.num_timesteps == (0 if what == "first observation" else 4)


def test_settings_of_normalisation_are_reached_from_outside() -> None:
    venv = VecNormalize(make_vec("Tiger-v0", 2), norm_obs=False)
    tiny(env=venv).get_env().training = False
    assert not venv.training


def test_an_optimizer_may_loop_over_its_parameters() -> None:
    tiny(policy_kwargs={"optimizer_kwargs": {"foreach": True}}).learn(20)


def test_changing_units_changes_no_value() -> None:
    model = tiny(env=make_vec("Tiger-v0", 2)).learn(40)
    policy, obs = model.policy, th.tensor([[[0], [1], [2]]])
    nothing = th.zeros(1, 3)

    def values() -> th.Tensor:
        with th.no_grad():
            return policy.bellman_units.unstandardize(policy.q_net(Observed(obs, nothing.long() - 1, nothing)).q_values)

    before = values()
    for size in (1.0, 30.0, 1000.0, 0.01):  # in small steps and in large ones
        policy.update_bellman_units(size * th.randn(4000) + size, th.ones(4000))
        th.testing.assert_close(values(), before, rtol=1e-3, atol=1e-3)
    assert 0.5 < policy.q_net.scale < 2


# ---------------------------------------------------------------------- it learns


def test_learns_to_listen_before_opening() -> None:
    """A short version of ``python -m benchmarks run tiger_learned``: far better than the -11 of listening for ever."""
    settings = tuned("ben", "Tiger-v0")
    model = BEN(env=make_vec("Tiger-v0", settings.pop("n_envs"), seed=0), seed=0, **settings).learn(60_000)
    worlds = make_vec("Tiger-v0", 256, seed=9)
    mean, _ = evaluate_policy(model, worlds, 1024, deterministic=True, warn=False)
    assert mean > 40
    belief = model.bellman_distribution(np.array([0]))
    assert belief.mean[0].argmax() == LISTEN
    assert belief.aleatoric_std[0, :LISTEN].min() > 150  # opening blindly, +10 or -500 with equal chance: 255
    assert belief.aleatoric_std[0, LISTEN] < 100
    assert belief.epistemic_std.max() < 60


def test_encoder_weight_scales_the_gradient_of_the_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("MlpGruPolicy").learn(64)
    monkeypatch.setattr(model.operator, "msbbe", lambda batch, estimate: (th.zeros(()), {}))
    histories = model.replay_buffer.sample(4)

    def gradients(weight: float) -> tuple[th.Tensor, th.Tensor]:
        monkeypatch.setattr("sb3_ben.ben.learning.ENCODER_WEIGHT", weight)
        model.policy.aleatoric.zero_grad()
        encoding = model.policy.encode(histories.observed).encoding
        encoding.latent.retain_grad()
        b = bellman_samples(model.policy, histories, encoding, model.rule)
        th.manual_seed(0)
        model.operator.losses(transitions(model.policy, histories, encoding, b, Seen(100))).total.backward()
        return encoding.latent.grad, next(model.policy.aleatoric.parameters()).grad

    (full, flow), (tenth, same_flow), (none, _) = (gradients(weight) for weight in (1.0, 0.1, 0.0))
    assert full.any()
    assert flow.any()
    th.testing.assert_close(tenth, 0.1 * full)
    th.testing.assert_close(same_flow, flow)
    assert not none.any()


def test_unseen_histories_stay_uncertain() -> None:
    """The epistemic spread where data are is a fraction of that in observations that never occurred."""
    rng = np.random.default_rng(0)

    class Walk(gym.Env):
        observation_space, action_space = spaces.Box(-10, 10, (2,), dtype=np.float32), spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            self.t = 0
            return rng.normal(size=2).astype(np.float32) * 0.1 + 1, {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
            self.t += 1
            return rng.normal(size=2).astype(np.float32) * 0.1 + 1, float(action), self.t == 10, False, {}

    kwargs: dict[str, Any] = {"gamma": 0.5, "learning_rate": 3e-3, "batch_size": 16, "sequence_length": 10}
    model = BEN("MlpPolicy", Walk(), learning_starts=200, seed=0, **kwargs).learn(1000)
    seen = model.bellman_distribution(np.ones((1, 2), dtype=np.float32)).epistemic_std.mean()
    unseen = model.bellman_distribution(np.array([[-8.0, 6.0]], dtype=np.float32)).epistemic_std.mean()
    assert unseen > 1.5 * seen
