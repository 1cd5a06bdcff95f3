"""History replay: every returned sequence is a piece of one episode, exactly as it was stored."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_ben.ben.paper import EpisodeReplayBuffer
from sb3_ben.envs import make_vec
from sb3_ben.history.replay import HistoryReplayBuffer

BOX = spaces.Box(-np.inf, np.inf, (3,), dtype=np.float32)
DICT = spaces.Dict({"vector": BOX, "image": spaces.Box(0, 255, (3, 4, 4), dtype=np.uint8)})
ACTIONS = spaces.Discrete(1000)


def encode(space: spaces.Space, env: int, episode: int, step: int) -> Any:
    """An observation that says where it comes from."""
    vector = np.array([env, episode, step], dtype=np.float32)
    if isinstance(space, spaces.Dict):
        return {"vector": vector, "image": np.full((3, 4, 4), (env * 7 + episode * 3 + step) % 256, dtype=np.uint8)}
    return vector


def stack(rows: list[Any]) -> Any:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]} if isinstance(rows[0], dict) else np.stack(rows)


class Recorder:
    """Fills a buffer with episodes of random lengths, and remembers how each episode ended."""

    def __init__(self, buffer: HistoryReplayBuffer, space: spaces.Space, seed: int = 0) -> None:
        self.buffer, self.space, self.rng = buffer, space, np.random.default_rng(seed)
        self.episode = np.zeros(buffer.n_envs, dtype=int)
        self.step = np.zeros(buffer.n_envs, dtype=int)
        self.ends: dict[tuple[int, int], tuple[int, str]] = {}

    def observe(self) -> Any:
        return stack([encode(self.space, i, self.episode[i], self.step[i]) for i in range(self.buffer.n_envs)])

    def run(self, n_steps: int, p_end: float = 0.15) -> None:
        for _ in range(n_steps):
            obs = self.observe()
            action, reward = self.step % 1000, (100 * self.episode + self.step).astype(np.float32)
            self.step += 1
            next_obs = self.observe()
            done = self.rng.random(self.buffer.n_envs) < p_end
            truncated = done & (self.rng.random(self.buffer.n_envs) < 0.5)
            self.buffer.add(obs, next_obs, action, reward, done, [{"TimeLimit.truncated": bool(t)} for t in truncated])
            for i in np.flatnonzero(done):
                self.end(i, "truncated" if truncated[i] else "terminated")

    def end(self, i: Any, how: str) -> None:
        self.ends[int(i), int(self.episode[i])] = (int(self.step[i]), how)
        self.episode[i] += 1
        self.step[i] = 0

    def interrupt(self) -> None:
        """All environments are reset without any episode being done."""
        self.buffer.start_episodes()
        for i in range(self.buffer.n_envs):
            self.end(i, "interrupted")


def vector_of(observations: Any) -> np.ndarray:
    return (observations["vector"] if isinstance(observations, dict) else observations).numpy()


def check(recorder: Recorder, samples: Any) -> list[tuple[int, int, int, int]]:
    """Check a batch against the rule by which it was written; return (env, episode, first step, length) of every history."""
    seen = vector_of(samples.observations).astype(int)
    lengths = samples.mask.sum(dim=0).numpy().astype(int)
    histories = []
    for k, length in enumerate(lengths):
        env, episode, first = seen[0, k]
        steps = first + np.arange(length + 1)
        assert samples.mask[:, k].tolist() == [1.0] * length + [0.0] * (len(samples.mask) - length)
        assert samples.actions[:length, k].tolist() == (steps[:-1] % 1000).tolist()
        assert samples.rewards[:length, k].tolist() == (100 * episode + steps[:-1]).tolist()
        end, how = recorder.ends.get((env, episode), (10**9, "running"))
        ended = steps[-1] == end
        assert samples.dones[:length, k].tolist() == [0.0] * (length - 1) + [float(ended and how == "terminated")]
        known = length if ended and how == "terminated" else length + 1  # after a real end the successor does not matter
        assert np.array_equal(seen[:known, k], [(env, episode, t) for t in steps[:known]])
        previous = np.where(steps[1:known] > 0, steps[1:known] - 1, -1)
        assert samples.previous_actions[1:known, k].tolist() == previous.tolist()
        assert samples.previous_rewards[1:known, k].tolist() == (100 * episode + previous).tolist()
        if first == 0:
            assert (samples.previous_actions[0, k], samples.previous_rewards[0, k]) == (-1, 0.0)
        else:
            assert samples.previous_actions[0, k] in (-1, first - 1)
        histories.append((env, episode, first, length))
    return histories


@pytest.mark.parametrize("space", [BOX, DICT])
@pytest.mark.parametrize(
    ("buffer_size", "n_envs", "sequence_length"), [(60, 3, 5), (60, 1, 50), (1000, 3, 4), (40, 4, 10), (3, 1, 7)]
)
def test_sequences_are_pieces_of_episodes(space: spaces.Space, buffer_size: int, n_envs: int, sequence_length: int) -> None:
    np.random.seed(0)
    buffer = HistoryReplayBuffer(buffer_size, space, ACTIONS, "cpu", n_envs, sequence_length=sequence_length)
    recorder = Recorder(buffer, space)
    for _ in range(8):
        recorder.run(11)
        histories = check(recorder, buffer.sample(64))
        assert all(1 <= length <= sequence_length for *_, length in histories)
        recorder.interrupt()
    recorder.run(7)
    check(recorder, buffer.sample(256))


def test_every_transition_is_replayed() -> None:
    """In a long episode the inner transitions equally often, those near its ends within a factor of two."""
    np.random.seed(0)
    buffer = HistoryReplayBuffer(400, BOX, ACTIONS, "cpu", n_envs=2, sequence_length=5)
    recorder = Recorder(buffer, BOX)
    recorder.run(200, p_end=0.0)
    counts = np.zeros((2, 200))
    for env, _, first, length in check(recorder, buffer.sample(10_000)):
        counts[env, first : first + length] += 1
    relative = counts / counts.mean()
    assert abs(relative[:, 10:-10] - 1).max() < 0.5
    assert relative.min() > 0.4
    assert relative.max() < 2


def test_short_episodes_come_whole() -> None:
    np.random.seed(0)
    buffer = HistoryReplayBuffer(1000, BOX, ACTIONS, "cpu", n_envs=2, sequence_length=50)
    recorder = Recorder(buffer, BOX)
    recorder.run(400, p_end=0.3)
    for env, episode, first, length in check(recorder, buffer.sample(200)):
        assert first == 0
        assert length == recorder.ends.get((env, episode), (recorder.step[env], ""))[0]


def test_first_steps_weigh_less_in_histories_that_begin_in_the_middle() -> None:
    buffer = HistoryReplayBuffer(500, BOX, ACTIONS, n_envs=3, sequence_length=6, warm_up=3)
    Recorder(buffer, BOX).run(150, p_end=0.05)
    samples = buffer.sample(300)
    begins = (samples.previous_actions[0] == -1).numpy()
    assert 0 < begins.sum() < 300
    mask, whole = samples.mask.numpy(), samples.mask.numpy().astype(bool).all(axis=0)
    assert set(mask[:, begins].flatten()) <= {0, 1}
    assert np.allclose(mask[:, ~begins & whole].T, [1 / 3, 2 / 3, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="warm_up"):
        HistoryReplayBuffer(500, BOX, ACTIONS, sequence_length=6, warm_up=-1)


def test_so_they_do_after_the_oldest_step_of_an_episode_that_began_before_it() -> None:
    buffer = HistoryReplayBuffer(10, BOX, ACTIONS, sequence_length=10, warm_up=4)
    Recorder(buffer, BOX).run(25, p_end=0.0)
    assert np.allclose(buffer.sample(20).mask[:4].mean(dim=1), [0.25, 0.5, 0.75, 1])


def test_transitions_of_short_and_long_episodes_have_the_same_chance() -> None:
    np.random.seed(0)
    buffer = HistoryReplayBuffer(1000, BOX, ACTIONS, sequence_length=10)
    recorder = Recorder(buffer, BOX)
    lengths = [2, 10, 5, 10, 1] * 10
    for length in lengths:
        recorder.run(length - 1, p_end=0.0)
        recorder.run(1, p_end=1.1)
    counts = np.zeros(len(lengths))
    for _, episode, first, length in check(recorder, buffer.sample(20_000)):
        assert first == 0
        assert length == lengths[episode]
        counts[episode] += 1
    assert buffer.shortest == 1
    # each episode is drawn as often as every other, and with it each of its transitions
    assert np.abs(counts / counts.mean() - 1).max() < 0.25


def test_the_last_transition_before_a_time_limit_counts() -> None:
    buffer = HistoryReplayBuffer(100, BOX, ACTIONS, "cpu", sequence_length=4)
    row = np.zeros((1, 3), dtype=np.float32)
    for t in range(4):
        buffer.add(row, row, np.zeros(1), np.ones(1), np.full(1, t == 3), [{"TimeLimit.truncated": t == 3}])
    samples = buffer.sample(5)
    assert samples.cuts is not None
    assert samples.mask.all()
    assert samples.cuts[3].all()
    assert not samples.cuts[:3].any()
    assert not samples.dones.any()


def test_running_episodes() -> None:
    buffer = EpisodeReplayBuffer(1000, BOX, ACTIONS, "cpu", n_envs=3, sequence_length=6)
    recorder = Recorder(buffer, BOX)
    recorder.run(40, p_end=0.1)
    recorder.interrupt()
    recorder.run(4, p_end=0.0)
    histories = check(recorder, buffer.running_episodes())
    assert [(env, first, length) for env, _, first, length in histories] == [(i, 0, 4) for i in range(3)]
    recorder.run(5, p_end=0.0)
    assert [(first, length) for *_, first, length in check(recorder, buffer.running_episodes())] == [(3, 6)] * 3


def test_time_limits_can_be_treated_as_ends() -> None:
    buffer = HistoryReplayBuffer(100, BOX, ACTIONS, "cpu", handle_timeout_termination=False)
    row = np.zeros((1, 3), dtype=np.float32)
    buffer.add(row, row, np.zeros(1), np.zeros(1), np.ones(1), [{"TimeLimit.truncated": True}])
    assert buffer.sample(1).dones.item() == 1


@pytest.mark.parametrize("n_steps", [30, 75])
def test_pickle_in_the_middle_of_an_episode(n_steps: int) -> None:
    buffer = HistoryReplayBuffer(120, DICT, ACTIONS, "cpu", n_envs=2, sequence_length=9)
    recorder = Recorder(buffer, DICT)
    recorder.run(n_steps)
    copied = pickle.loads(pickle.dumps(buffer))
    twin = Recorder(copied, DICT)
    twin.__dict__.update(
        {**pickle.loads(pickle.dumps({k: v for k, v in vars(recorder).items() if k != "buffer"})), "buffer": copied}
    )
    for one in (recorder, twin):
        one.run(20)
    samples = []
    for filled in (buffer, copied):
        np.random.seed(1)
        samples.append(filled.sample(32))
    check(twin, samples[1])
    tensors = [name for name in samples[0]._fields if name not in ("observations", "beliefs", "n_simulated")]
    assert all(th.equal(getattr(samples[0], name), getattr(samples[1], name)) for name in tensors)


def n_bytes(thing: Any) -> int:
    """Bytes of all arrays in an object."""
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(map(n_bytes, thing.values()))
    return sum(map(n_bytes, vars(thing).values())) if hasattr(thing, "keys") else 0


@pytest.mark.parametrize("env_id", ["Tiger-v0", "SearchAndRescue5x5-v0"])
def test_memory(env_id: str) -> None:
    """Observations are stored once: all arrays together take at most 1.2 times the raw ones."""
    venv = make_vec(env_id, 8, seed=0)
    buffer = HistoryReplayBuffer(8000, venv.observation_space, venv.action_space, "cpu", n_envs=8)
    obs: Any = venv.reset()
    for _ in range(1500):  # the ring is filled one and a half times
        actions = np.array([venv.action_space.sample() for _ in range(8)])
        new_obs, rewards, dones, infos = venv.step(actions)
        next_obs = np.array(new_obs)
        for i in np.flatnonzero(dones):
            next_obs[i] = infos[i]["terminal_observation"]
        buffer.add(obs, next_obs, actions, rewards, dones, infos)
        obs = new_obs
    raw = sum(n_bytes(array) for array in (buffer.observations, buffer.actions, buffer.rewards, buffer.dones, buffer.timeouts))
    total = sum(n_bytes(value) for value in vars(buffer).values())
    assert raw < total <= 1.2 * raw


def test_vec_normalize() -> None:
    """Original observations and rewards are stored; what is sampled is normalised, the previous reward is not."""
    venv = VecNormalize(make_vec("SearchAndRescue5x5-v0", 2, seed=0), norm_reward=True)
    venv.reset()
    for _ in range(50):
        venv.step(np.array([4, 4]))
    buffer = HistoryReplayBuffer(100, venv.observation_space, venv.action_space, "cpu", n_envs=2, sequence_length=4)
    obs = venv.get_original_obs()
    for _ in range(10):
        venv.step(np.array([4, 4]))
        new_obs = venv.get_original_obs()
        buffer.add(obs, new_obs, np.array([4, 4]), venv.get_original_reward(), np.zeros(2), [{}, {}])
        obs = new_obs
    samples = buffer.sample(8, env=venv)
    assert samples.rewards.max() > -1
    assert set(samples.previous_rewards[1].tolist()) == {-1.0}
    assert isinstance(samples.observations, th.Tensor)
    stored = np.asarray(buffer.observations)
    assert stored[0, 0, 2:].min() >= 0
    assert not np.isin(samples.observations[0].numpy(), stored).all()
    assert samples.observations.dtype == th.float32


def test_bad_sequence_length() -> None:
    with pytest.raises(ValueError, match="sequence_length"):
        HistoryReplayBuffer(10, BOX, ACTIONS, sequence_length=0)


def test_action_spaces_that_start_elsewhere() -> None:
    buffer = EpisodeReplayBuffer(10, BOX, spaces.Discrete(3, start=5), "cpu")
    row = np.zeros((1, 3), dtype=np.float32)
    for _ in range(2):
        buffer.add(row, row, np.array([6]), np.zeros(1), np.zeros(1), [{}])
    samples = buffer.running_episodes()
    assert samples.actions.flatten().tolist() == [1, 1]
    assert samples.previous_actions.flatten().tolist() == [-1, 1, 1]


class BelievingRecorder(Recorder):
    """Stores a belief beside every observation: three times what is observed, plus one."""

    def run(self, n_steps: int, p_end: float = 0.15) -> None:
        for _ in range(n_steps):
            now = 3 * self.observe() + 1
            self.step += 1
            after = 3 * self.observe() + 1
            self.step -= 1
            self.buffer.add_beliefs(now, after)
            super().run(1, p_end)


@pytest.mark.parametrize(("buffer_size", "n_envs", "sequence_length"), [(60, 3, 5), (1000, 3, 4), (40, 4, 10), (3, 1, 7)])
def test_beliefs_travel_with_their_observations(buffer_size: int, n_envs: int, sequence_length: int) -> None:
    """Over the write position, at time limits and interruptions, and for the newest successors."""
    np.random.seed(0)
    buffer = HistoryReplayBuffer(buffer_size, BOX, ACTIONS, "cpu", n_envs, sequence_length=sequence_length, belief_dim=3)
    recorder = BelievingRecorder(buffer, BOX)
    for _ in range(8):
        recorder.run(11)
        samples = buffer.sample(64)
        check(recorder, samples)
        assert samples.beliefs is not None
        assert np.array_equal(samples.beliefs.numpy(), 3 * vector_of(samples.observations) + 1)
        recorder.interrupt()


def test_forgotten_and_misshapen_beliefs_are_refused() -> None:
    buffer = HistoryReplayBuffer(10, BOX, ACTIONS, "cpu", belief_dim=3)
    with pytest.raises(ValueError, match="add_beliefs"):
        Recorder(buffer, BOX).run(1)
    with pytest.raises(ValueError, match="shape"):
        buffer.add_beliefs(np.zeros((1, 3)), np.zeros((1, 2)))
