"""Priors: each form of knowledge against exact results, and refused where it does not fit."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from torch.distributions import Independent, MultivariateNormal, Normal

from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.ben.exact import bellman_means
from sb3_ben.ben.learning import ModelOperator, bellman_samples
from sb3_ben.ben.paper import PaperBEN
from sb3_ben.common.export import export_torchscript
from sb3_ben.envs.search_and_rescue import LISTEN, SearchAndRescueConfig, SearchAndRescueEnv, SearchAndRescueVecEnv
from sb3_ben.envs.tiger import TigerConfig, TigerEnv
from sb3_ben.flows.units import RunningStandardizer
from sb3_ben.history.encoder import Pass
from sb3_ben.history.previous_reward import attach_reward
from sb3_ben.history.samples import Observed, join_histories
from sb3_ben.oracles.rescue_filter import RescueFilter
from sb3_ben.oracles.rescue_prior import FAR, RescueBelief, RescueTransitions, exact_filter
from sb3_ben.oracles.search_and_rescue import BeliefAgent, KnowsTheMap
from sb3_ben.oracles.tiger import BayesOptimal, action_values, bayes_optimal_values
from sb3_ben.oracles.tiger_prior import TigerBelief, TigerModel
from sb3_ben.priors import KnownTransitions, Prior, Simulations, Transitions
from sb3_ben.priors.filters import BeliefTracker
from sb3_ben.priors.models import with_last_observations
from sb3_ben.priors.transitions import transition_histories, with_pasts
from tests.test_ben import RESUME, SaveInTheMiddle, parameters_of, same, tiny

DOCS = Path(__file__).resolve().parent.parent / "docs"
SMALL = SearchAndRescueConfig(grid_size=3, n_victims=1, n_hazards=2, horizon=9)


def small_rescue(n_envs: int = 3, seed: int | None = 0, **kwargs: Any) -> SearchAndRescueVecEnv:
    arguments = {"grid_size": 3, "n_victims": 1, "n_hazards": 2, "horizon": 9}
    return SearchAndRescueVecEnv(n_envs, seed=seed, **{**arguments, **kwargs})


# ---------------------------------------------------------------------- (d) beliefs


@pytest.fixture(scope="module")
def rescuer() -> Any:
    """An agent with the exact filter, after a few episodes of random actions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningStandardizer, "update", lambda *args: None)  # units of rewards stay as they were
        kwargs: dict[str, Any] = {"buffer_size": 300, "sequence_length": 9, "learning_starts": 1000}
        return tiny("MlpGruPolicy", small_rescue(), prior=Prior(belief=RescueBelief(SMALL)), **kwargs).learn(75)


def filtered(observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> list[np.ndarray]:
    """Features and expected rewards after every step of a batch of episodes, straight from the filter."""
    rescue_filter, belief = RescueFilter(SMALL), RescueBelief(SMALL)
    state, believed = rescue_filter.initial(observations.shape[1]), belief.initial(observations.shape[1])
    found = []
    for step in zip(observations, actions, rewards, strict=True):
        state, believed = rescue_filter.update(state, *step), belief.update(believed, *step)
        assert np.allclose(believed[4], rescue_filter.posterior(state).doors[..., 1:])
        found.append(np.concatenate((belief.features(believed), belief.rewards(believed)), axis=1))
    return found


def test_replayed_beliefs_are_those_of_the_filter(rescuer: BEN) -> None:
    """After every observation of whole episodes, the ones at time limits and the newest included."""
    histories = rescuer.replay_buffer.sample(64)
    assert histories.beliefs is not None
    assert (histories.previous_actions[0] == -1).all()  # whole episodes
    observations, actions, rewards, beliefs = (
        part.numpy()  # type: ignore[union-attr]
        for part in (histories.observations, histories.previous_actions, histories.previous_rewards, histories.beliefs)
    )
    expected = filtered(observations, actions, rewards)
    n_compared = 0
    for t, (features, found) in enumerate(zip(expected, beliefs, strict=True)):
        real = np.ones(64, dtype=bool) if t == 0 else histories.mask[t - 1].numpy().astype(bool)
        assert np.allclose(found[real], features[real], atol=1e-4)
        n_compared += int(real.sum())
    assert n_compared > 300
    assert histories.mask.sum(dim=0).max() == 9  # a time limit was among them


def test_beliefs_in_predict_are_those_of_acting(rescuer: BEN) -> None:
    buffer, state = rescuer.replay_buffer, None
    belief = RescueBelief(SMALL)
    for t in range(buffer.size()):
        rewards = buffer.rewards[t - 1] if t else np.zeros(3, dtype=np.float32)
        observations = attach_reward(buffer.observations[t], rewards)  # type: ignore[index]
        _, state = rescuer.predict(observations, state, buffer.episode_starts[t], deterministic=True)  # type: ignore[arg-type]
        assert state is not None
        assert np.allclose(belief.features(state[2:-1]), buffer.beliefs[t, :, : belief.size], atol=1e-6)
        assert np.allclose(belief.rewards(state[2:-1]), buffer.beliefs[t, :, belief.size :], atol=1e-4)
        state = rescuer.policy.with_actions(state, buffer.actions[t, :, 0])
    assert rescuer._memory is not None
    for ours, theirs in zip(rescuer._memory, state, strict=True):  # type: ignore[arg-type]
        assert np.allclose(ours, theirs, atol=1e-6)


def test_belief_says_what_doors_promise() -> None:
    """The features of the rescue belief against what the exact posterior says, by hand."""
    belief, env = RescueBelief(SMALL), small_rescue(1)
    tracker = BeliefTracker([belief])
    obs = np.asarray(env.reset())
    believed = tracker.begin(obs)
    listens, visits, sums, largest, more_sums = (believed.features[0, start : start + 5] for start in (0, 5, 10, 15, 20))
    blind = (SMALL.n_victims * 10 - SMALL.n_hazards * 100) / 12
    assert np.isclose(RescueTransitions(SMALL).blind_reward, blind)
    assert not listens.any()
    assert visits.tolist() == [0, 0, 0, 0, 0.25]
    assert not sums.any()  # no door is worth opening blindly
    assert not largest.any()
    # from the centre of a 3x3 grid two doors of each side are three steps away, at the corners, and the one between them two
    arriving = SMALL.n_victims / 12 * 4 * (FAR**2 + 2 * FAR**3)
    assert np.isclose(more_sums[4], arriving / 2)
    assert np.allclose(more_sums[:4], more_sums[0])  # all sides are alike
    for action in (LISTEN, LISTEN, 3):  # twice in the centre, then one step to the right
        obs, rewards, _, _ = env.step(np.array([action]))  # type: ignore[assignment]
        believed = tracker.advance(believed.state, np.asarray(obs), np.array([action]), rewards)
    assert believed.features[0, :5].tolist() == [0, 0, 0.5, 0, 0]  # two of four listens, now on the left
    assert believed.features[0, 5:10].tolist() == [0, 0, 0.25, 0.25, 0.25]  # visits since the last listen; on the right is a wall
    opens = believed.features[0, 44:48]
    assert opens.tolist() == [0, 0, 0, 1]
    right_door = 3 * 3 + 1
    victim, hazard = believed.state[4][0, right_door]
    assert np.isclose(belief.rewards(believed.state)[0, 3], 10 * victim - 100 * hazard)
    assert np.isclose(believed.features[0, 43], np.clip(victim - 10 * hazard, -1, 1))
    assert belief.rewards(believed.state)[0].tolist()[:3] == [0, 0, 0]
    assert belief.rewards(believed.state)[0, LISTEN] == -1
    for action in (2, 3, 2):  # to and fro teaches nothing, and is not the same state again
        obs, rewards, _, _ = env.step(np.array([action]))  # type: ignore[assignment]
        believed = tracker.advance(believed.state, np.asarray(obs), np.array([action]), rewards)
    assert believed.features[0, 5:10].tolist() == [0, 0, 0, 0.5, 0.75]
    obs, rewards, _, _ = env.step(np.array([LISTEN]))  # type: ignore[assignment]
    believed = tracker.advance(believed.state, np.asarray(obs), np.array([LISTEN]), rewards)
    assert believed.features[0, 5:10].tolist() == [0, 0, 0, 0, 0.25]


def test_expected_rewards_are_those_that_come_on_average() -> None:
    """The exact filter's expectations: deterministic where nothing is hidden, unbiased and far less noisy at the doors."""
    belief, env = RescueBelief(SMALL), small_rescue(500)
    obs, rng, n = np.asarray(env.reset()), np.random.default_rng(0), np.arange(500)
    tracker = BeliefTracker([belief], n_actions=5)
    believed, errors, sampled = tracker.begin(obs), [], []
    for _ in range(8):
        actions = rng.integers(5, size=500)
        expected = believed.features[n, belief.size + actions]
        opens = belief.filter.opened_door(believed.state[0], actions) >= 0
        obs, rewards, _, _ = env.step(actions)  # type: ignore[assignment]
        assert np.array_equal(expected[~opens], rewards[~opens])
        errors.append((rewards - expected)[opens])
        sampled.append(rewards[opens])
        believed = tracker.advance(believed.state, np.asarray(obs), actions, rewards)
    error = np.concatenate(errors)
    assert len(error) > 500
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error))
    assert error.std() < 0.9 * np.concatenate(sampled).std()


def test_bellman_samples_are_made_of_expected_rewards(rescuer: BEN) -> None:
    histories = rescuer.replay_buffer.sample(64)
    assert histories.beliefs is not None
    opened = histories.rewards != 0
    expected = histories.beliefs[:-1, :, -5:].gather(-1, histories.actions[..., None])[..., 0]
    encoding = rescuer.policy.encode(histories.observed).encoding
    silent = th.cat((histories.beliefs[..., :-5], th.zeros_like(histories.beliefs[..., -5:])), dim=-1)
    found = bellman_samples(rescuer.policy, histories, encoding, rescuer.rule).b
    found = found - bellman_samples(rescuer.policy, histories._replace(beliefs=silent), encoding, rescuer.rule).b
    assert th.allclose(found, expected, atol=1e-3)
    assert not th.allclose(expected[opened], histories.rewards[opened])


def test_expected_rewards_are_checked() -> None:
    class Wrong(RescueBelief):
        def rewards(self, state: Any) -> np.ndarray:
            return np.full((len(state[0]), 4), np.nan)

    with pytest.raises(ValueError, match=r"rewards\(\) of Wrong"):
        tiny("MlpGruPolicy", small_rescue(), prior=Prior(belief=Wrong(SMALL))).learn(20)
    normalized = VecNormalize(small_rescue(), norm_obs=False)
    with pytest.raises(ValueError, match="norm_reward=False"):
        tiny("MlpGruPolicy", normalized, prior=Prior(belief=RescueBelief(SMALL)))


def test_restart_touches_new_episodes_only() -> None:
    tracker = BeliefTracker([TigerBelief()])
    believed = tracker.begin(np.zeros(3, dtype=np.int64))
    believed = tracker.advance(believed.state, np.array([1, 1, 2]), np.array([2, 2, 2]), np.full(3, -1.0))
    restarted = tracker.restart(believed, np.zeros(3, dtype=np.int64), np.array([False, True, False]))
    assert np.allclose(restarted.features[[0, 2]], believed.features[[0, 2]])
    assert np.allclose(restarted.features[1], 0.5)
    assert not np.allclose(believed.features[1], 0.5)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("algorithm", [BEN, PaperBEN])
def test_belief_save_load_and_other_number_of_envs(policy: str, algorithm: type[BEN], tmp_path: Path) -> None:
    model = tiny(policy, make_vec("Tiger-v0", 3), prior=Prior(belief=TigerBelief()), cls=algorithm).learn(80)
    model.save(tmp_path / "model")
    assert "belief" not in model.policy_kwargs
    loaded = algorithm.load(tmp_path / "model", env=make_vec("Tiger-v0", 2))
    assert same(parameters_of(model), parameters_of(loaded))
    loaded.learn(40)
    model.policy.save(str(tmp_path / "policy"))
    policy_alone = type(model.policy).load(str(tmp_path / "policy"))
    obs = np.array([0, 1])
    assert np.array_equal(policy_alone.predict(obs)[0], model.policy.predict(obs)[0])
    assert model.predict(np.array(0), deterministic=True)[0].shape == ()
    with th.no_grad():
        expected = model.predict(obs, deterministic=True)[0]
        assert np.array_equal(model.policy._predict(th.as_tensor(obs)).numpy(), expected)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"prior": Prior(belief=TigerBelief())},
        {"prior": Prior(belief=TigerBelief(), model=TigerModel())},
        {"prior": Prior(model=TigerModel(), simulations=Simulations(TigerEnv, BayesOptimal(), 60, 2, fraction=0.5))},
    ],
)
def test_resume_with_a_prior_in_a_new_process_is_exact(kwargs: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), train_freq=3, **copy.deepcopy(kwargs))
    model.learn(140, callback=SaveInTheMiddle(74, tmp_path))
    subprocess.run([sys.executable, "-c", RESUME, str(tmp_path), "66", "BEN"], check=True)
    resumed = np.load(tmp_path / "after.npz")
    assert np.array_equal(resumed["actions"], model.replay_buffer.actions)
    for i, value in enumerate(parameters_of(model)):
        assert np.array_equal(resumed[f"arr_{i}"], value), list(model.policy.state_dict())[i]


def test_unknown_rewards_reach_a_filter_as_nan() -> None:
    seen: list[np.ndarray] = []

    class Watching(TigerBelief):
        def update(self, state: Any, observations: Any, previous_actions: Any, previous_rewards: Any) -> Any:
            seen.append(previous_rewards)
            return super().update(state, observations, previous_actions, previous_rewards)

    model = tiny("MlpPolicy", prior=Prior(belief=Watching())).learn(40)
    seen.clear()
    _, state = model.predict(np.array([0]))
    with pytest.warns(UserWarning, match="no previous reward"):
        model.predict(np.array([1]), state)
    assert np.array_equal(seen[0], [0])
    assert np.isnan(seen[1]).all()


def test_belief_is_an_input_of_exported_policies(tmp_path: Path) -> None:
    model = tiny("MlpGruPolicy", prior=Prior(belief=TigerBelief())).learn(40)
    export_torchscript(model.policy, tmp_path / "policy.pt")
    exported = th.jit.load(str(tmp_path / "policy.pt"))
    obs, nothing = th.tensor([0, 2]), th.zeros(2)
    inputs = (obs, nothing.long() - 1, nothing, th.full((2, 2), 0.5), *model.policy.q_net.initial_hidden(2))
    expected, _ = model.predict(attach_reward(obs.numpy(), nothing.numpy()), deterministic=True)
    assert np.array_equal(exported(*inputs)[0].numpy(), expected)


# ---------------------------------------------------------------------- (c) exact models


def whole_episodes(model: BEN) -> Any:
    histories = model.replay_buffer.sample(32)
    beliefs = histories.beliefs[:-1, :, : TigerModel.size].double().numpy()  # type: ignore[index]
    return histories, beliefs[..., 0]


def exact_values(beliefs: np.ndarray, horizon: int | None = None) -> np.ndarray:
    """Exact action values, solved once for each belief."""
    unique, where = np.unique(beliefs.round(7), return_inverse=True)
    return action_values(TigerConfig(), unique, discount=0.9, horizon=horizon)[where.reshape(beliefs.shape)]


def test_model_without_future_gives_the_expected_reward() -> None:
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 4), prior=Prior(model=TigerModel()), sequence_length=11).learn(99)
    histories, beliefs = whole_episodes(model)
    expected = exact_values(beliefs, horizon=1)
    assert np.allclose(bellman_means(model.policy, histories, gamma=0.0).numpy(), expected, atol=1e-3)
    assert len(np.unique(beliefs.round(6))) >= 4  # certain, uncertain and in between


def test_optimal_values_are_the_fixed_point_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """B+ Q* = Q*, with the exact action values in the place of the target network."""
    prior = Prior(model=TigerModel(), belief=TigerBelief())
    model = tiny("MlpPolicy", make_vec("Tiger-v0", 4), prior=prior, sequence_length=11, learning_starts=10**6).learn(99)

    def exact(inputs: th.Tensor, hidden: Any = None) -> Any:
        """The inputs without memory are the one-hot state and the two probabilities."""
        return Pass(inputs, th.as_tensor(exact_values(inputs[..., 3].double().numpy())).float(), ())

    monkeypatch.setattr(model.policy.q_net_target, "evaluate", exact)
    histories, beliefs = whole_episodes(model)
    means = bellman_means(model.policy, histories, gamma=0.9).numpy()
    assert np.allclose(means, exact_values(beliefs), atol=0.05)


def test_a_model_takes_the_place_of_the_flows_and_changes_no_argument() -> None:
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), prior=Prior(model=TigerModel())).learn(40)
    assert model.bellman == "flow"
    assert isinstance(model.operator, ModelOperator)
    with pytest.raises(ValueError, match="no distribution of b"):
        model.bellman_distribution(np.array([0]))


def test_last_observations_count_for_a_model() -> None:
    options: dict[str, Any] = {"buffer_size": 300, "replay_buffer_kwargs": {"warm_up": 0}}
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 3, seed=0), prior=Prior(model=TigerModel()), **options).learn(11 * 3)
    model.learn(4 * 3, reset_num_timesteps=False)  # a whole episode of each environment, and the beginning of another
    replayed = model.replay_buffer.sample(20)
    last = (th.arange(len(replayed.mask))[:, None] == replayed.mask.sum(dim=0) - 1).float()
    replayed = replayed._replace(dones=last * (th.arange(20) < 5))  # some of them have ended for good
    extended = with_last_observations(replayed)
    assert len(extended.mask) == len(replayed.mask) + 1
    lengths, more = replayed.mask.sum(dim=0), extended.mask.sum(dim=0)
    ends = (replayed.mask * replayed.dones).sum(dim=0)
    assert ends.sum() == 5
    assert th.equal(more, lengths + 1 - ends)
    assert bellman_means(model.policy, extended, 0.9).shape == (*extended.mask.shape, 3)


def test_pretraining_on_a_model_values_the_first_observation() -> None:
    """With no future the values are the expected rewards, before anything has happened."""
    options: dict[str, Any] = {"gamma": 0.0, "learning_rate": 1e-2}
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), prior=Prior(model=TigerModel()), **options).pretrain(300)
    encoding = model.policy.recall(np.zeros(2, dtype=np.int64), None, None).encoding
    values = model.policy.bellman_units.unstandardize(encoding.q_values).numpy()
    config = TigerConfig()
    door = (config.reward_tiger + config.reward_gold) / 2
    expected = np.full(3, door)
    expected[np.abs(values[0] - config.reward_listen).argmin()] = config.reward_listen
    assert np.allclose(values, expected, atol=5)


def test_model_and_belief_learn_the_exact_action_values() -> None:
    prior = Prior(model=TigerModel(), belief=TigerBelief())
    kwargs: dict[str, Any] = {
        "policy_kwargs": {"net_arch": [32]},
        "gamma": 0.9,
        "learning_rate": 1e-2,
        "batch_size": 16,
        "tau": 0.2,
    }
    kwargs |= {"buffer_size": 3000, "sequence_length": 11, "train_freq": 1, "target_update_interval": 8, "exploration": "spread"}
    model = tiny("MlpPolicy", make_vec("Tiger-v0", 8, seed=0), prior=prior, **kwargs).learn(2500)
    net, seen = np.array([0, 1, 2, 0]), np.array([-1, -1, -1, 1])  # hearings of door 1, and a tiger that was met
    features = TigerBelief().features((net, seen))
    nothing, beliefs = th.zeros(1, 4), th.as_tensor(features, dtype=th.float32)[None]
    with th.no_grad():
        values = model.q_net(Observed(th.tensor([[[0], [1], [1], [2]]]), nothing.long() - 1, nothing, beliefs)).q_values
    found = model.policy.bellman_units.unstandardize(values[0]).numpy()
    exact = action_values(TigerConfig(), features[:, 0], discount=0.9)
    assert np.array_equal(found.argmax(axis=1), exact.argmax(axis=1))
    assert np.abs(found - exact).max() < 30  # of values between -410 and 100
    optimal = BayesOptimal(TigerConfig(), bayes_optimal_values(TigerConfig(), 0.9))
    scores = [
        evaluate_policy(agent, make_vec("Tiger-v0", 256, seed=9), 512, deterministic=True, warn=False)[0]
        for agent in (model, optimal)
    ]
    assert scores[0] > scores[1] - 5


def test_wrong_outcomes_are_refused() -> None:
    class Wrong(TigerModel):
        part, value = "probabilities", 0.7

        def outcomes(self, observations: Any, actions: Any) -> Any:
            right = super().outcomes(observations, actions)
            return right._replace(**{self.part: getattr(right, self.part) * self.value})

    class Infinite(Wrong):
        part, value = "rewards", np.inf

    class Short(TigerModel):
        def outcomes(self, observations: Any, actions: Any) -> Any:
            return super().outcomes(observations[:-1], actions[:-1])

    for wrong, message in ((Wrong, "sum to 1"), (Infinite, "not finite"), (Short, "must have shape")):
        with pytest.raises(ValueError, match=message):
            tiny("MlpPolicy", make_vec("Tiger-v0", 2), prior=Prior(model=wrong())).learn(40)


# ---------------------------------------------------------------------- (a) known transitions


def test_rescue_transitions_are_those_of_the_world() -> None:
    config = SearchAndRescueConfig()
    batch, env = RescueTransitions(config, seed=0)(200), SearchAndRescueEnv()
    assert np.isclose(RescueTransitions(config).blind_reward, -27.142857)
    for obs, action, reward, after in zip(*(batch[i] for i in (0, 1, 2, 3)), strict=True):
        env.reset(seed=0)
        env.world.agent[0] = obs[:2]  # type: ignore[attr-defined]
        found, real, *_ = env.step(action)
        assert np.array_equal(found, after)
        assert reward == (0 if real == 0 and not np.array_equal(obs, after) else RescueTransitions(config).blind_reward)
    assert {0.0, RescueTransitions(config).blind_reward} == set(batch.rewards.tolist())


@pytest.mark.parametrize("bellman", ["flow", "point"])
def test_pretraining_learns_known_transitions(bellman: str) -> None:
    known = RescueTransitions(SMALL, seed=0)
    options: dict[str, Any] = {"bellman": bellman, "gamma": 0.0, "learning_rate": 1e-2, "batch_size": 64}
    model = tiny("MlpPolicy", small_rescue(), prior=Prior(transitions=known), policy_kwargs={"net_arch": [32]}, **options)
    model.pretrain(300)
    batch = known(64)
    nothing = th.zeros(1, 64)
    with th.no_grad():
        values = model.q_net(Observed(th.as_tensor(batch.observations)[None], nothing.long() - 1, nothing)).q_values
    values = model.policy.bellman_units.unstandardize(values[0]).gather(1, th.as_tensor(batch.actions)[:, None])[:, 0]
    if bellman == "point":
        assert np.abs(values.numpy() - batch.rewards).max() < 3
    assert values[batch.rewards < 0].max() < values[batch.rewards == 0].min()
    assert all(np.isfinite(part).all() for part in parameters_of(model))


def test_pasts_are_other_known_transitions() -> None:
    known, n, length = RescueTransitions(SMALL, seed=0)(12), 3, 4
    known = known._replace(dones=np.arange(12) == 4)  # the second step of the second history
    space: Any = small_rescue().observation_space
    single = transition_histories(known, space, small_rescue().action_space, None, th.device("cpu"))  # type: ignore[arg-type]
    histories: Any = with_pasts(single, length)
    observations, actions = known.observations.reshape(length, n, -1), known.actions.reshape(length, n)
    assert np.array_equal(histories.observations[:-1], observations)
    assert np.array_equal(histories.observations[-1], known.next_observations.reshape(length, n, -1)[-1])
    assert np.array_equal(histories.actions, actions)
    assert np.array_equal(histories.previous_actions, np.concatenate((np.full((1, n), -1), actions)))
    assert np.array_equal(histories.previous_rewards[1:], known.rewards.reshape(length, n).astype(np.float32))
    assert np.array_equal(histories.mask, [[0, 0, 0]] * 3 + [[1, 0, 1]])


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_transitions_that_end_episodes_have_no_past_among_them(share: float) -> None:
    def ending(n: int) -> Transitions:
        return RescueTransitions(SMALL, seed=0)(n)._replace(dones=np.arange(n) < share * n)

    model = tiny("MlpGruPolicy", small_rescue(), prior=Prior(transitions=ending)).pretrain(20)
    assert all(np.isfinite(part).all() for part in parameters_of(model))


def test_what_is_known_holds_after_any_past() -> None:
    """A recurrent agent that walks to and fro arrives with memories that no first observation has."""
    options = {"batch_size": 32, "learning_rate": 3e-3, "gamma": 0.9, "tau": 0.1, "sequence_length": 8, "bellman": "point"}
    sizes = {"net_arch": [32], "rnn_hidden_size": 32}
    model = tiny(
        "MlpGruPolicy", small_rescue(), prior=Prior(transitions=RescueTransitions(SMALL, seed=0)), policy_kwargs=sizes, **options
    )
    model.pretrain(500)
    left, right = 2, 3
    obs, state, values = np.zeros((1, 5), dtype=np.float32), None, []
    for step in range(8):
        obs[0, 0] = step % 2  # from the centre to a cell with a door, and back
        encoding, hidden, _ = model.policy.recall(obs, state, None)
        values.append(model.policy.bellman_units.unstandardize(encoding.q_values)[0].numpy())
        state = model.policy.remember(hidden, np.array([right if step % 2 == 0 else left]))
    at_door = np.array(values)[1::2]
    blind = RescueTransitions(SMALL).blind_reward
    assert np.abs(at_door[:, left]).max() < 6  # free, with nothing to gain
    assert np.abs(at_door[:, right] - blind).max() < 8


def test_no_door_is_opened_that_was_opened_in_the_past() -> None:
    """A door has its blind reward once: what is known of it says nothing after a past in which it was opened."""
    config = SearchAndRescueConfig(grid_size=3, n_victims=1, n_hazards=2)
    length, n = 6, 500
    drawn = RescueTransitions(config, door_share=0.9, seed=0)(length * n)
    space: Any = SearchAndRescueEnv(grid_size=3, n_victims=1, n_hazards=2)
    single = transition_histories(drawn, space.observation_space, space.action_space, None, th.device("cpu"))
    histories = with_pasts(single, length, drawn.once)
    observations = cast(th.Tensor, histories.observations)
    again = ((observations[:-2] == observations[-2]).all(dim=-1) & (histories.actions[:-1] == histories.actions[-1])).any(dim=0)
    opens = histories.rewards[-1] != 0
    assert (again & opens).any()
    assert not histories.mask[-1][again & opens].any()
    assert histories.mask[-1][~(again & opens)].all()  # moves may be made again and again


def test_pairs_and_outcomes_make_transitions() -> None:
    def pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(n, dtype=np.int64), np.full(n, 2)

    def outcomes(observations: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.full(len(actions), -1.0), 1 + np.arange(len(actions)) % 2, np.zeros(len(actions))

    prior = Prior(transitions=KnownTransitions(pairs, outcomes), belief=TigerBelief())
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), prior=prior, n_pretrain_steps=3).learn(40)
    assert model._n_pretrained == 3


GOOD = Transitions(
    np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64), np.zeros(4), np.zeros(4, dtype=np.int64), np.zeros(4)
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rewards": np.array([0, 0, 0, np.nan])}, "rewards.*not finite"),
        ({"rewards": np.zeros((4, 1))}, "rewards.*shape"),
        ({"actions": np.full(4, 3)}, "actions.*Discrete"),
        ({"actions": np.zeros(4)}, "actions.*integers"),
        ({"observations": np.zeros((4, 2))}, "observations.*shape"),
        ({"next_observations": np.full(4, np.nan)}, "next_observations.*not finite"),
        ({"dones": np.zeros(3)}, "dones.*shape"),
    ],
)
def test_wrong_transitions_are_refused(wrong: dict[str, Any], message: str) -> None:
    model = tiny("MlpPolicy", prior=Prior(transitions=lambda n: GOOD._replace(**wrong)))
    with pytest.raises(ValueError, match=message):
        model.pretrain(1)


# ---------------------------------------------------------------------- (b) simulations


def test_simulated_demonstrations() -> None:
    """Half of the episodes are those of an agent that knows the map, and belief and buffer see them like real ones."""
    simulations = Simulations(lambda: small_rescue(4, horizon=20), KnowsTheMap, 2000, demonstrations=0.5, epsilon=0.2)
    kwargs: dict[str, Any] = {"prior": Prior(simulations=simulations, belief=RescueBelief(SMALL)), "sequence_length": 20}
    model = tiny("MlpPolicy", small_rescue(2), **kwargs)
    buffer = model.simulated
    assert buffer.size() * buffer.n_envs == 2000
    assert not np.shares_memory(buffer.rewards, model.replay_buffer.rewards)
    hazards = (buffer.rewards == -100).reshape(25, 20, 4).any(axis=1)
    rescues = (buffer.rewards == 10).reshape(25, 20, 4).any(axis=1)
    assert 30 < (rescues & ~hazards).sum() <= 70  # most of the guided half, and few of the others
    assert 20 < hazards.sum() < 70
    again = tiny("MlpPolicy", small_rescue(2), **kwargs).simulated
    assert np.array_equal(again.actions, buffer.actions)
    assert np.array_equal(again.beliefs, buffer.beliefs)
    histories = buffer.sample(16)
    found = filtered(histories.observations.numpy(), histories.previous_actions.numpy(), histories.previous_rewards.numpy())
    assert histories.beliefs is not None
    assert np.allclose(histories.beliefs[-1].numpy(), found[-1], atol=1e-4)


def test_demonstrators_stay_good_when_disturbed() -> None:
    """Random actions in between are told to their memory: no demonstrator opens a hazard's door by itself."""
    for behaviour, n_rescued in ((KnowsTheMap, 8), (BeliefAgent(SMALL), 3)):
        venv = small_rescue(8, horizon=40)
        agent = Simulations(lambda: venv, behaviour, epsilon=0.3).agent(venv)  # noqa: B023
        rng, obs, state, starts = np.random.default_rng(0), np.asarray(venv.reset()), None, np.ones(8, dtype=bool)
        wrong, victims = 0, 0
        rewards = np.zeros(8, dtype=np.float32)
        for _ in range(38):
            chosen, state = agent.predict(attach_reward(obs, rewards), state, starts)
            random = np.where(rng.random(8) < 0.3, rng.integers(5, size=8), chosen)
            state = agent.with_actions(state, random)
            new_obs, rewards, _, infos = venv.step(random)
            wrong += int(((rewards == -100) & (random == chosen)).sum())
            obs, starts, victims = np.asarray(new_obs), np.zeros(8, dtype=bool), sum(info["victims"] for info in infos)
        assert wrong == 0
        assert victims >= n_rescued


def test_pretraining_on_simulations_and_mixing() -> None:
    simulations = Simulations(TigerEnv, BayesOptimal(), n_steps=400, n_envs=4, fraction=0.5)
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), prior=Prior(simulations=simulations), n_pretrain_steps=5)
    before = parameters_of(model)
    model.learn(10)
    assert model._n_updates == 0
    assert not same(before, parameters_of(model))
    model.learn(60, reset_num_timesteps=False)
    assert model._n_pretrained == 5
    assert model.replay(8).mask.shape[1] == 8


def test_joined_histories_keep_every_transition() -> None:
    models = [
        tiny("MlpPolicy", make_vec("Tiger-v0", 2), prior=Prior(belief=TigerBelief()), sequence_length=n).learn(40)
        for n in (3, 11)
    ]
    short, long = (model.replay_buffer.sample(4) for model in models)
    joined = join_histories(short, long)
    assert joined.mask.shape == (len(long.mask), 8)
    assert joined.observations.shape[:2] == joined.beliefs.shape[:2] == (len(long.mask) + 1, 8)  # type: ignore[union-attr]
    assert joined.mask.sum() == short.mask.sum() + long.mask.sum()
    assert th.equal(joined.rewards[: len(short.mask), :4], short.rewards)
    assert th.equal(joined.beliefs[:, 4:], long.beliefs)  # type: ignore[index]


def test_simulations_of_another_form_are_refused() -> None:
    for wrong, message in (
        (lambda: make_vec("BernoulliBandit-v0", 2), "observation_space|action_space"),
        (lambda: "Tiger-v0", "make_env"),
    ):
        model = tiny("MlpPolicy", prior=Prior(simulations=Simulations(wrong)))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            model.pretrain(1)
    other_noise = Simulations(lambda: small_rescue(2, sigma_noise=1.0), n_steps=50)
    tiny("MlpPolicy", small_rescue(2), prior=Prior(simulations=other_noise)).pretrain(2)


# ---------------------------------------------------------------------- pre-training


class SaveAt(BaseCallback):
    """Save the model after some steps of pre-training."""

    def __init__(self, at: int, path: Path) -> None:
        super().__init__()
        self.at, self.path = at, path
        self.logged: dict[str, Any] = {}

    def _on_step(self) -> bool:
        self.logged.update(self.logger.name_to_value)
        if self.n_calls == self.at:
            assert isinstance(self.model, BEN)
            self.model.save(self.path)
        return True


def test_pretraining_is_logged_saved_and_continued_exactly(tmp_path: Path) -> None:
    prior = Prior(simulations=Simulations(TigerEnv, BayesOptimal(), n_steps=200, n_envs=2))
    callback = SaveAt(4, tmp_path / "model")
    model = tiny("MlpGruPolicy", make_vec("Tiger-v0", 2), prior=prior).pretrain(10, callback=callback)
    assert {"pretrain/loss", "pretrain/msbbe", "pretrain/elbo", "pretrain/n_steps"} <= set(callback.logged)
    loaded = BEN.load(tmp_path / "model", env=make_vec("Tiger-v0", 2))
    assert loaded._n_pretrained == 4
    loaded.pretrain(6)
    assert same(parameters_of(model), parameters_of(loaded))


def test_a_callback_can_stop_pretraining() -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 3

    model = tiny("MlpPolicy", prior=Prior(transitions=lambda n: GOOD)).pretrain(10, callback=Stop(), progress_bar=True)
    assert model._n_pretrained == 3


# ---------------------------------------------------------------------- priors over phi, and what is refused


def normal(size: int, mean: float = 0.0, scale: float = 0.3) -> Independent:
    return Independent(Normal(th.full((size,), mean), th.full((size,), scale)), 1)


def test_priors_over_phi() -> None:
    """Of any scale and mean, bare or in a Prior; psi starts there."""
    for prior in (normal(6, 0.5), Prior(phi=normal(6, 0.5)), MultivariateNormal(th.full((6,), 0.5), 0.09 * th.eye(6))):
        model = tiny(prior=prior)
        phi, _ = model.policy.epistemic.rsample_and_log_prob(4000)
        assert th.allclose(phi.mean(0), th.full((6,), 0.5), atol=0.03)
        assert th.allclose(phi.std(0), th.full((6,), 0.3), atol=0.03)
        model.learn(40)
    inside = tiny(policy_kwargs={"prior": normal(6, 0.5)})
    assert same(parameters_of(inside), parameters_of(tiny(prior=normal(6, 0.5))))


def test_priors_made_for_the_environment(tmp_path: Path) -> None:
    """By a function or its dotted name, also in worker processes; what was made is saved, not how."""
    name = "sb3_ben.oracles.rescue_prior.exact_filter"
    subprocesses = SubprocVecEnv([lambda: SearchAndRescueEnv(grid_size=3, n_victims=1, n_hazards=2)] * 2)
    for prior, env in ((exact_filter, small_rescue()), (name, small_rescue()), (name, subprocesses)):
        model = tiny("MlpPolicy", env, prior=prior)
        assert isinstance(model.prior, Prior)
        assert isinstance(model.known.belief, RescueBelief)
        assert model.known.belief.config.grid_size == 3
    subprocesses.close()
    model.save(tmp_path / "model")
    assert isinstance(BEN.load(tmp_path / "model").known.belief, RescueBelief)
    assert tiny(prior=lambda env: normal(6, 0.5)).known.phi is not None
    for wrong, message in (
        ("sb3_ben.oracles.rescue_prior.nothing", "package.module.function"),
        ("nowhere.nothing", "package.module.function"),
        (lambda env: None, "it made None"),
        (name, "search and rescue"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(prior=wrong)
    with pytest.raises(ValueError, match="give an environment"):
        Prior.of(name)


class Shapeless(TigerBelief):
    def features(self, state: Any) -> Any:
        return super().features(state)[:, :1]


class NotFinite(TigerBelief):
    def features(self, state: Any) -> Any:
        return super().features(state) * np.nan


class ListState(TigerBelief):
    def initial(self, n_envs: int) -> Any:
        return list(super().initial(n_envs))


class OneRow(TigerBelief):
    def update(self, state: Any, *args: Any) -> Any:
        return tuple(part[:1] for part in super().update(state, *args))


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (lambda: normal(5), r"event shape \(6,\)"),
        (lambda: Normal(th.zeros(6), th.ones(6)), "event shape"),
        (lambda: Independent(Normal(th.full((6,), th.nan), th.ones(6), validate_args=False), 1), "not finite"),
        (lambda: 3.0, "`prior` must be"),
        (lambda: "uniform", "`prior` must name"),
        (lambda: Prior(phi="uniform"), "phi"),  # type: ignore[arg-type]
        (lambda: Prior(transitions=[1, 2]), "transitions"),  # type: ignore[arg-type]
        (lambda: Prior(simulations=TigerEnv), "simulations"),  # type: ignore[arg-type]
        (lambda: Prior(model=TigerBelief()), "model"),  # type: ignore[arg-type]
        (lambda: Prior(belief=np.zeros(3)), "belief"),  # type: ignore[arg-type]
        (lambda: Prior(simulations=Simulations(TigerEnv, epsilon=2.0)), "epsilon"),
        (lambda: Prior(simulations=Simulations(TigerEnv, n_steps=0)), "n_steps"),
        (lambda: Prior(belief=Shapeless()), "features.*shape"),
        (lambda: Prior(belief=NotFinite()), "not finite"),
        (lambda: Prior(belief=ListState()), "tuple of arrays"),
        (lambda: Prior(belief=OneRow()), "2 rows"),
    ],
)
def test_impossible_priors(prior: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(env=make_vec("Tiger-v0", 2), prior=prior()).learn(4)


def test_impossible_combinations() -> None:
    model = Prior(model=TigerModel())
    for kwargs, message in (
        ({"prior": normal(6), "policy_kwargs": {"prior": normal(6)}}, "two priors"),
        ({"prior": model, "bellman": "point"}, "bellman"),
        ({"bellman": "model"}, "bellman"),
        ({"prior": model, "exploration": "posterior"}, "exploration"),
        ({"prior": model, "n_steps": 3}, "n_steps"),
        ({"prior": model, "replay_buffer_class": ReplayBuffer}, "HistoryReplayBuffer"),
        ({"prior": Prior(simulations=Simulations(TigerEnv)), "cls": PaperBEN}, "simulations"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(**kwargs)
    venv = VecNormalize(DummyVecEnv([lambda: SearchAndRescueEnv(grid_size=3, n_victims=1, n_hazards=2)]))
    with pytest.raises(ValueError, match="norm_obs=False"):
        tiny(env=venv, prior=Prior(belief=RescueBelief(SMALL)))
    with pytest.raises(ValueError, match="nothing to pre-train"):
        tiny(prior=Prior(belief=TigerBelief()), bellman="point").pretrain(1)
    with pytest.raises(ValueError, match="with_actions"):
        Simulations(TigerEnv, tiny()).agent(make_vec("Tiger-v0", 1))


# ---------------------------------------------------------------------- the guide


def test_the_guide_runs(capsys: pytest.CaptureFixture) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "priors.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    exec("\n".join(blocks), {"__name__": "guide"})
    assert float(capsys.readouterr().out) > 11
