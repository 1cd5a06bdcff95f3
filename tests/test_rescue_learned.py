"""The belief about search and rescue that is learned from doors opened at random."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks import learned_belief
from sb3_ben import BEN, evaluate_policy
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig, SearchAndRescueVecEnv
from sb3_ben.oracles.rescue_filter import Door
from sb3_ben.oracles.rescue_learned import (
    HAZARD,
    NOTHING,
    VICTIM,
    LearnedRescueBelief,
    LearnFromOpenings,
    Openings,
    _LogSumExp,
    join_openings,
    learned_filter,
    random_openings,
    unlearned_filter,
)
from sb3_ben.priors import Prior
from tests.test_ben import tiny

SMALL = SearchAndRescueConfig(grid_size=3, n_victims=1, n_hazards=2)


@pytest.fixture(scope="module")
def openings() -> tuple[Openings, Openings]:
    return random_openings(SMALL, 4000, n_steps=30, seed=0), random_openings(SMALL, 500, n_steps=30, seed=1)


@pytest.fixture(scope="module")
def learned(openings: tuple[Openings, Openings]) -> LearnedRescueBelief:
    th.manual_seed(0)
    np.random.seed(0)
    belief = LearnedRescueBelief(SMALL, n_anchors=6)
    belief.fit(openings[0], 1000, learning_rate=3e-2)
    return belief


def exact_entropy(data: Openings) -> float:
    """The negative log-likelihood of the exact posterior."""
    return learned_belief.quality(learned_belief.exact(data, SMALL), data.found, SMALL).likelihood


def test_random_openings(openings: tuple[Openings, Openings]) -> None:
    data = openings[0]
    assert len(data.found) > 10_000
    assert (data.doors[np.arange(len(data.found)), data.opened] == Door.UNOPENED).all()
    # the first door of an episode is any door
    first = data.found[(data.doors == Door.UNOPENED).all(axis=1)]
    for kind, expected in ((VICTIM, 1 / 12), (HAZARD, 2 / 12)):
        assert abs((first == kind).mean() - expected) < 4 * np.sqrt(expected / len(first))
    again = random_openings(SMALL, 4000, n_steps=30, seed=0)
    assert all(np.array_equal(one, other) for one, other in zip(data, again, strict=True))


def test_it_learns_most_of_what_the_exact_posterior_knows(
    openings: tuple[Openings, Openings], learned: LearnedRescueBelief
) -> None:
    _, unseen = openings
    rates = np.bincount(unseen.found, minlength=3) / len(unseen.found)
    nothing_heard = float(-(rates * np.log(rates)).sum())
    exact, ours = exact_entropy(unseen), learned.score(unseen)
    assert exact < ours < nothing_heard
    assert (nothing_heard - ours) / (nothing_heard - exact) > 0.6


def test_what_was_seen_is_certain(learned: LearnedRescueBelief) -> None:
    state = learned.filter.initial(1)
    state.doors[0, :3] = Door.EMPTY, Door.HAZARD, Door.RESCUED
    found = learned._probabilities(state)[0]
    assert found[0].tolist() == [0, 0]
    assert found[1].tolist() == [0, 1]
    assert found[2].tolist() == [0, 0]
    assert (found[3:] > 0).all()


def test_as_belief_of_an_agent(learned: LearnedRescueBelief, tmp_path: Path) -> None:
    """It trains, is saved with the model and gives the same actions in the loaded one."""
    env = SearchAndRescueVecEnv(4, grid_size=3, n_victims=1, n_hazards=2, horizon=20)
    env.seed(0)
    model = tiny("MlpPolicy", env, prior=Prior(belief=learned)).learn(200)
    model.save(tmp_path / "model")
    loaded = BEN.load(tmp_path / "model")
    scores = []
    for agent in (model, loaded):
        worlds = SearchAndRescueVecEnv(4, grid_size=3, n_victims=1, n_hazards=2, horizon=20)
        worlds.seed(1)
        scores.append(evaluate_policy(agent, worlds, 8, deterministic=True, warn=False, return_episode_rewards=True))
    assert scores[0] == scores[1]


def test_as_prior_made_for_the_environment() -> None:
    """The seed of the model is that of the belief, too."""
    env = SearchAndRescueVecEnv(4, grid_size=3, n_victims=1, n_hazards=2, horizon=20)
    prior = functools.partial(learned_filter, n_episodes=20, n_steps=3, n_anchors=2)
    anchors = []
    for seed in (0, 0, 1):
        belief = tiny("MlpPolicy", env, prior=prior, seed=seed).known.belief
        assert isinstance(belief, LearnedRescueBelief)
        anchors.append(belief.network.anchors)
    assert th.equal(anchors[0], anchors[1])
    assert not th.equal(anchors[0], anchors[2])


def small_env(seed: int = 0) -> SearchAndRescueVecEnv:
    return SearchAndRescueVecEnv(4, seed=seed, grid_size=3, n_victims=1, n_hazards=2, horizon=20)


class Watch(BaseCallback):
    """Counts what doors held, from the environment's own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.victims = self.hazards = 0

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                self.victims += info["victims"]
                self.hazards += info["hazards"]
        return True


def check_replayed_beliefs(model: BEN) -> None:
    """What is replayed is what the belief says now of each stored history."""
    tracker, buffer = model.policy.tracker, model.replay_buffer
    assert tracker is not None
    believed = None
    for row in range(buffer.pos):
        observations, starts = buffer.observations[row], buffer.episode_starts[row]  # type: ignore[index]
        believed = tracker.restart(believed, observations, starts)
        assert np.allclose(buffer.beliefs[row], believed.features, atol=1e-6)
        after = buffer.observations[row + 1] if row + 1 < buffer.pos else buffer.latest_observations  # type: ignore[index]
        believed = tracker.advance(believed.state, after, buffer.actions[row, :, 0], buffer.rewards[row])
    assert model._believed is not None
    runs = ~np.asarray(model._last_episode_starts)
    assert believed is not None
    assert np.allclose(model._believed.features[runs], believed.features[runs])


def test_an_agent_learns_its_belief_from_its_own_openings() -> None:
    """All of them are seen, with what had been heard before; the belief changes, and what is replayed is read again."""
    model = tiny("MlpPolicy", small_env(), prior=unlearned_filter, learning_starts=410)
    belief = model.known.belief
    assert isinstance(belief, LearnedRescueBelief)
    anchors, watch = belief.network.anchors.detach().clone(), Watch()
    callback = LearnFromOpenings([400, 480], n_steps=5)
    model.learn(400, [callback, watch])  # five whole episodes in each of the four environments
    assert not th.equal(anchors, belief.network.anchors)
    check_replayed_beliefs(model)
    data = join_openings(belief.experience)
    assert (data.found == VICTIM).sum() == watch.victims
    assert 0 < (data.found == HAZARD).sum() <= watch.hazards  # which hurt as often as their doors are opened
    assert (data.found == NOTHING).any()
    assert (data.doors[np.arange(len(data.found)), data.opened] == Door.UNOPENED).all()
    assert data.heard.any()
    model.learn(80, callback, reset_num_timesteps=False)
    assert belief.experience == []
    check_replayed_beliefs(model)  # also of episodes that were running, and later than the first time
    with pytest.raises(ValueError, match="LearnedRescueBelief"):
        tiny("MlpPolicy", small_env()).learn(4, callback)


def test_learning_from_openings_goes_on_after_a_save(tmp_path: Path) -> None:
    """What was found is saved with the model, and episodes that run, as after 96 steps, are followed from where they are."""
    whole, broken = (
        tiny("MlpPolicy", small_env(), prior=unlearned_filter, learning_starts=1000).learn(steps, LearnFromOpenings([10_000]))
        for steps in (160, 96)
    )
    broken.save(tmp_path / "model")
    loaded = BEN.load(tmp_path / "model", env=broken.get_env(), force_reset=False)
    loaded.learn(64, LearnFromOpenings([10_000]), reset_num_timesteps=False)
    beliefs = [model.known.belief for model in (whole, loaded)]
    assert all(isinstance(belief, LearnedRescueBelief) for belief in beliefs)
    one, other = (join_openings(belief.experience) for belief in beliefs)  # type: ignore[union-attr]
    assert len(one.found) > 5
    assert all(np.array_equal(first, second) for first, second in zip(one, other, strict=True))


def test_log_sum_exp_is_torchs_own() -> None:
    x = (100 * th.randn(5, 3, 4, dtype=th.float64)).requires_grad_()
    weights = th.randn(3, 4, dtype=th.float64)
    ours, theirs = _LogSumExp.apply(x), x.logsumexp(dim=0)
    th.testing.assert_close(ours, theirs)
    gradients = [th.autograd.grad((weights * value).sum(), x, retain_graph=True)[0] for value in (ours, theirs)]
    th.testing.assert_close(*gradients)


def test_quality_of_a_belief_by_hand() -> None:
    probabilities = np.array([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.2, 0.8, 0.0]])  # which promise 5, -22.5 and 8
    found = learned_belief.quality(probabilities, np.array([VICTIM, HAZARD, NOTHING]), SMALL)
    assert found == pytest.approx((-np.log([0.5, 0.25, 0.2]).mean(), 2 / 3, 6.5, 5.0))
    nothing = learned_belief.quality(probabilities[1:2], np.array([NOTHING]), SMALL)
    assert nothing[1:] == pytest.approx((0, np.nan, np.nan), nan_ok=True)


def test_learned_and_exact_beliefs_promise_what_doors_pay(
    learned: LearnedRescueBelief, openings: tuple[Openings, Openings]
) -> None:
    data = openings[1]
    exact = learned_belief.quality(learned_belief.exact(data, SMALL), data.found, SMALL)
    other = learned_belief.quality(learned_belief.learned(learned, data), data.found, SMALL)
    assert other.likelihood == pytest.approx(learned.score(data), rel=1e-4)
    assert exact.likelihood < other.likelihood
    assert exact.promised == pytest.approx(exact.paid, abs=1.0)


def test_command_compares_beliefs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--episodes", "20", "--learn-episodes", "20", "--learn-steps", "2"]
    monkeypatch.setattr("sys.argv", ["learned_belief", "--settings", "3x3/1/2:0.5", *small])
    learned_belief.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert "promised" in header
    assert [row[14:28].strip() for row in rows] == ["nothing heard", "learned", "exact"]
