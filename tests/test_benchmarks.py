"""The benchmarks: every experiment in small, interruptions, clusters, and the page that is made of the results."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import joblib
import numpy as np
import pytest
import torch as th
import yaml
from rliable import metrics
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from benchmarks import tuning
from benchmarks.__main__ import PAGE, RESULTS, main
from benchmarks.harness import archives, claims, priors, records, report, running, statistics, store, training
from benchmarks.harness.experiment import (
    EVALUATION_SEED,
    FIRST_TEST_SEED,
    FOLDER,
    N_TUNING_SEEDS,
    SEED_STRIDE,
    TUNING_EVALUATION_SEED,
    Agent,
    Claim,
    Job,
    digest_of,
    load,
    load_all,
)
from benchmarks.harness.training import Places, run_job
from sb3_ben import BEN, make_vec

pytestmark = pytest.mark.xdist_group("benchmarks")  # one process, since many look at the same results
EXPERIMENTS = {name: experiment.as_smoke() for name, experiment in load_all().items()}


def job_of(agent: str, steps: int) -> Job:
    """A run on the tiger problem."""
    experiment = dataclasses.replace(EXPERIMENTS["tiger_learned"], steps=steps)
    return next(job for job in experiment.jobs() if job.agent == agent and job.seed is not None)


def same(first: records.Record, second: records.Record) -> bool:
    return first.arrays.keys() == second.arrays.keys() and all(
        np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays
    )


# ---------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("agent", ["BEN", "RecurrentPPO", "BootDQN+prior"])
def test_killed_job_goes_on_exactly(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(agent, steps=240)
    whole, broken = (Places(tmp_path / name, tmp_path / f"{name}-work", 0.0) for name in ("whole", "broken"))
    assert run_job(job, whole) is None
    save = training.save_checkpoint
    calls: list[None] = []

    def save_and_die(*args: Any) -> None:
        save(*args)
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run_job(job, broken)
    assert store.find(job, broken.results) is None
    np.random.seed(1)  # whatever happens in the meantime
    assert run_job(job, broken) is None
    one, other = (store.find(job, places.results) for places in (whole, broken))
    assert one is not None
    assert other is not None
    assert (one.meta["n_resumed"], other.meta["n_resumed"]) == (0, 1)
    assert same(one, other)


def test_two_runs_do_not_share_a_job(tmp_path: Path) -> None:
    job, places = job_of("BEN without flows", steps=160), Places(tmp_path / "results", tmp_path / "work")
    with training.alone_in(places.of(job)):
        error = run_job(job, places)
        assert error is not None
        assert "another process is at work" in error
        assert store.find(job, places.results) is None
    assert run_job(job, places) is None
    assert store.find(job, places.results) is not None
    assert not places.of(job).exists()


def test_worlds_in_array_operations_are_those_of_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("BEN", steps=240)
    assert isinstance(training.vectorized([lambda: Monitor(gym.make("Tiger-v0"))]), VecMonitor)
    fast, slow = (Places(tmp_path / name, tmp_path / f"{name}-work") for name in ("fast", "slow"))
    assert run_job(job, fast) is None
    monkeypatch.setattr(training, "vectorized", DummyVecEnv)
    assert run_job(job, slow) is None
    one, other = (store.find(job, places.results) for places in (fast, slow))
    assert one is not None
    assert other is not None
    assert same(one, other)


# ---------------------------------------------------------------------- clusters


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What the condition returns as soon as it is true."""
    deadline = time.monotonic() + 480  # a cluster takes minutes to start on a busy machine
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"waited in vain for {what}")


def kill_worker(job: Job, places: Places, killed: list[int]) -> None:
    """Kill, as an accident would, the process that works on a job, once it has a checkpoint."""
    wait_for(lambda: training.checkpoints(places.of(job)), "a checkpoint")
    pid = int((places.of(job) / training.PID).read_text())
    os.kill(pid, signal.SIGKILL)
    killed.append(pid)


def test_damaged_checkpoint_is_given_up(tmp_path: Path) -> None:
    job, places = job_of("BEN without flows", steps=160), Places(tmp_path / "results", tmp_path / "work")
    checkpoint = places.of(job) / "checkpoint-80"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.zip").write_bytes(b"half of")
    assert run_job(job, places) is None
    record = store.find(job, places.results)
    assert record is not None
    assert record.meta["n_resumed"] == 0


def test_checkpoint_survives_what_is_not_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, places = job_of("BEN without flows", steps=160), Places(tmp_path / "results", tmp_path / "work")
    checkpoint = places.of(job) / "checkpoint-80"
    checkpoint.mkdir(parents=True)

    def out_of_memory(manager: training.Manager) -> None:
        raise MemoryError

    monkeypatch.setattr(training.Manager, "setup_experiment", out_of_memory)
    assert "MemoryError" in str(run_job(job, places))
    assert checkpoint.exists()


def test_weak_prior_follows_the_seed(tmp_path: Path) -> None:
    job = next(job for job in EXPERIMENTS["rescue_weak_prior"].jobs() if job.agent == "weak prior")
    found = []
    for name in ("first", "again"):
        assert run_job(job, Places(tmp_path / name, tmp_path / f"{name}-work")) is None
        record = store.find(job, tmp_path / name)
        assert record is not None
        found.append(record)
    assert same(*found)


@pytest.mark.parametrize("backend", ["loky", "ray"])
def test_job_of_a_killed_worker_is_repeated(backend: str, tmp_path: Path) -> None:
    """Two workers, real ones; one is killed in the middle of its job, which then goes on from its checkpoint."""
    pytest.importorskip("ray" if backend == "ray" else "joblib")
    jobs = [job_of("BEN without flows", steps=800), job_of("RecurrentPPO", steps=160)][: 2 if backend == "ray" else 1]
    places = Places(tmp_path / "results", tmp_path / "work", checkpoint_seconds=0.0)
    killed: list[int] = []
    killer = threading.Thread(target=kill_worker, args=(jobs[0], places, killed))
    killer.start()
    assert running.run(jobs, places, n_jobs=2, name=backend) == []
    killer.join()
    assert killed
    found = [store.find(job, places.results) for job in jobs]
    assert None not in found
    assert found[0] is not None
    assert found[0].meta["n_resumed"] >= 1
    assert found[0].meta["steps"] == 800
    assert not list(places.work.rglob("checkpoint*"))


def test_jobs_run_on_dask(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    places = Places(tmp_path / "results", tmp_path / "work")
    jobs = [job for job in EXPERIMENTS["tiger_learned"].jobs() if job.seed is None]
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        assert running.run(jobs, places, n_jobs=2, name="dask", address=cluster.scheduler_address) == []
        assert sum(worker.state.executed_count for worker in cluster.workers.values()) > 0
    assert running.missing(jobs, places.results) == []


def test_workers_of_dask_with_several_threads_are_refused(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    places = Places(tmp_path / "results", tmp_path / "work")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        pytest.raises(SystemExit, match="--nthreads 1"),
    ):
        running.run([job_of("BEN", 160)], places, n_jobs=2, name="dask", address=cluster.scheduler_address)


def test_isolated_jobs_have_processes_of_their_own(tmp_path: Path) -> None:
    job = job_of("BEN without flows", steps=160)
    job = dataclasses.replace(job, experiment=dataclasses.replace(job.experiment, isolated=True))
    assert running.run([job], Places(tmp_path / "results", tmp_path / "work")) == []
    record = store.find(job, tmp_path / "results")
    assert record is not None
    assert record.meta["memory_mb"] > 1  # which it would not be in a process that has done the like before


# ---------------------------------------------------------------------- all experiments, in small


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all smoke versions."""
    folder = tmp_path_factory.mktemp("benchmarks")
    arguments = ("run", "all", "--smoke", "--results", str(folder / "results"), "--work", str(folder / "work"))
    assert main(arguments) == 0
    assert not [path for path in (folder / "work").rglob("*") if path.is_file()]
    files = {path.name for path in (folder / "results").iterdir()}
    assert files == {store.LOCK, *(f"{name}{archives.ARCHIVE}" for name in EXPERIMENTS)}
    return folder / "results"


def test_every_experiment_has_all_its_results(results: Path) -> None:
    for experiment in EXPERIMENTS.values():
        for job in experiment.jobs():
            record = store.find(job, results)
            assert record is not None, job.name
            assert len(record.arrays["eval_return"]) == experiment.evaluation.episodes
            if job.seed is not None:
                assert record.meta["steps"] >= experiment.steps
                assert len(record.arrays["train_step"]) == len(record.arrays["train_return"]) > 0
                assert record.meta["configuration"]["hyperparams"]["n_envs"] > 0


def test_what_is_complete_is_not_run_again(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.xz")}
    assert main(("run", "tiger_learned", "--smoke", "--results", str(results))) == 0
    assert "0 to run" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.xz")} == before
    changed = dataclasses.replace(EXPERIMENTS["tiger_learned"], steps=161)
    assert len(running.missing(changed.jobs(), results)) == len(changed.agents)  # but those that are not trained


def test_agents_meet_the_same_worlds(results: Path) -> None:
    """Whoever listens all the time gets the same, and the best agent's returns depend on the worlds alone."""
    found = statistics.collect(EXPERIMENTS["rescue_noise"], results)
    assert [result.environment for result in found] == ["sigma 0.1", "sigma 0.3", "sigma 1.0"]
    job = next(job for job in EXPERIMENTS["tiger_learned"].jobs() if job.agent == "Bayes-optimal")
    first, again = store.find(job, results), training.measure_reference(job)
    assert first is not None
    assert np.array_equal(first.arrays["eval_return"], again.arrays["eval_return"])
    manager = training.Manager(job_of("RecurrentPPO", 160), results / "scratch", None)
    manager.setup_experiment()
    worlds = manager.evaluation_envs(8)
    worlds.reset()
    ours = make_vec("Tiger-v0", 8, seed=50_000)
    ours.reset()
    assert [env.unwrapped.world.contexts[0] for env in worlds.envs] == ours.world.contexts  # type: ignore[attr-defined]


def test_report_has_a_section_for_every_experiment(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 20)
    page = tmp_path / "docs" / "benchmarks.md"
    assert main(("report", "--smoke", "--results", str(results), "--page", str(page))) == 0
    text = page.read_text()
    for experiment in EXPERIMENTS.values():
        assert f"## {experiment.number}. {experiment.title}" in text
        assert all(f"| {agent} |" in text for agent in experiment.agents)
    assert "not run" not in text.lower()
    figures = re.findall(r"\((images/benchmarks/[^)]+)\)", text)
    assert figures
    assert all((page.parent / figure).read_text().startswith("<?xml") for figure in figures)
    assert not any("/speed-" in figure for figure in figures)  # of which only the metrics count


def test_list_says_what_things_cost(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("list", "--results", str(results))) == 0
    *lines, total = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[1] for line in lines] == list(EXPERIMENTS)
    assert all(re.search(r"\d (min|h) ", line) for line in (*lines, total))
    jobs = [job.digest() for experiment in load_all().values() for job in experiment.jobs()]
    assert total.split()[:2] == ["all", str(len(set(jobs)))]
    assert sum(int(line.split()[2]) for line in lines) == len(jobs) > len(set(jobs))


# ---------------------------------------------------------------------- statistics


def fake(returns: Any, **meta: Any) -> records.Record:
    return records.Record(meta, {"eval_return": np.asarray(returns, dtype=float)})


@pytest.fixture
def tiger() -> statistics.Results:
    """Made-up results of three agents in the same 400 worlds."""
    rng = np.random.default_rng(0)
    optimal = rng.normal(74.5, 30, size=400)
    agents = {
        "good": {seed: fake(optimal - 2 + 0.1 * seed) for seed in range(4)},
        "noisy": {seed: fake(optimal[rng.permutation(400)]) for seed in range(4)},
        "listens": {seed: fake(np.full(400, -11.0)) for seed in range(4)},
    }
    references = {"Bayes-optimal": fake(optimal), "always listens": fake(np.full(400, -11.0))}
    return statistics.Results(load_all()["tiger_learned"], "Tiger", agents, references)


def test_scores_lie_on_the_scale_from_listening_to_the_optimum(tiger: statistics.Results) -> None:
    exact = tiger.world.exact
    assert exact is not None
    assert exact == pytest.approx(74.52, abs=0.01)
    scores = statistics.iqm(tiger)
    assert scores["listens"] == (0, 0, 0)
    assert scores["good"].value == pytest.approx((exact - 1.85 + 11) / (exact + 11))  # the luck of the worlds is taken off
    assert scores["good"].low <= scores["good"].value <= scores["good"].high
    assert statistics.worst([fake(np.arange(100.0))]) == 2.0


def test_improvement_is_a_probability(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 40)
    assert statistics.improvement(tiger, "good", "listens") == (1, 1, 1)
    assert statistics.improvement(tiger, "listens", "good").value == 0
    assert statistics.improvement(tiger, "listens", "listens").value == 0.5


def test_verdicts_follow_the_numbers(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 40)
    experiment = tiger.experiment

    def holds(test: str, **arguments: Any) -> bool | None:
        return claims.decide(Claim("", "ours", test, arguments), experiment, [tiger]).holds

    assert holds("score_at_least", agent="good", iqm=0.95) is True
    assert holds("score_at_least", agent="listens", iqm=0.95) is False
    assert holds("improves", agent="good", over=["listens"]) is True
    assert holds("improves", agent="listens", over=["good"]) is False
    assert holds("no_worse", agent="good", than="listens") is True
    assert holds("no_worse", agent="good", than="good") is True
    assert holds("no_worse", agent="listens", than="good") is False
    assert holds("no_worse", agent="good", than="nobody") is None
    assert holds("statistic_between", agent="listens", name="return", low=-12, high=-10) is True
    assert holds("statistic_between", agent="listens", name="return", low=-10) is False
    good = statistics.statistic_interval(list(tiger.agents["good"].values()), "return")
    assert good.low < good.value < good.high
    assert holds("statistic_between", agent="good", name="return", low=good.low - 1) is True
    assert holds("statistic_between", agent="good", name="return", low=good.value) is None
    assert holds("statistic_between", agent="good", name="return", high=good.low - 1) is False
    assert holds("increases", agents=["listens", "good"]) is True
    assert holds("increases", agents=["good", "listens"]) is False
    assert holds("increases", agents=["good", "good"]) is None
    assert holds("improves", agent="good", over=["nobody"]) is None
    assert holds("improves", agent="good", over=["good"], probability=0.5) is None  # even odds are no improvement
    assert holds("score_at_least", agent="good", mean=0.95) is True
    assert holds("score_at_least", agent="listens", mean=0.95) is False
    score = statistics.iqm(tiger)["good"]
    assert score.low < score.value < score.high
    assert holds("score_at_least", agent="good", iqm=score.value) is None  # a part of the interval is below
    assert holds("score_at_least", agent="good", iqm=score.value, low=score.low) is True
    assert holds("score_at_least", agent="good", iqm=score.high + 0.01, low=0.0) is False
    assert holds("score_at_least", agent="good", mean=statistics.normalised_mean(tiger)["good"].value) is None
    claim = Claim("", "ours", "improves", {"agent": "good", "over": ["listens"]})
    assert str(claims.decide(claim, experiment, [tiger])) == "**holds** so far (4 of 10 seeds)"
    assert str(claims.decide(claim, dataclasses.replace(experiment, seeds=4), [tiger])) == "**holds**"


def test_ratios_to_nothing_are_infinite(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 40)
    for seed in range(4):
        tiger.agents["listens"][seed].arrays["eval_hazards"] = np.full(400, 5.0)
        tiger.agents["good"][seed].arrays["eval_hazards"] = np.zeros(400)
    assert claims.statistic_ratio(tiger, "listens", "good", "hazards", low=10).holds is True
    assert claims.statistic_ratio(tiger, "listens", "good", "hazards", low=10).evidence.endswith("ratio inf [inf, inf]")
    assert claims.statistic_ratio(tiger, "good", "listens", "hazards", low=10).holds is False
    assert claims.statistic_ratio(tiger, "good", "listens", "hazards", high=0.5).holds is True
    assert claims.statistic_ratio(tiger, "good", "good", "hazards", low=10).holds is None


def test_ratios_and_shares_are_judged_by_their_intervals(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 200)
    for seed in range(4):
        tiger.agents["listens"][seed].arrays |= {"eval_hazards": np.full(400, 2.0 + seed), "metric_ms": np.array(2.0 + seed)}
        tiger.agents["good"][seed].arrays |= {"eval_hazards": np.ones(400), "metric_ms": np.array(1.0)}
        tiger.agents["good"][seed].arrays["metric_pit"] = np.linspace(0, 1, 1001) / (1 + 0.02 * seed)
    found = statistics.ratio(np.array([2.0, 3.0, 4.0, 5.0]), np.ones(4), np.mean)
    assert found.value == pytest.approx(3.5)
    assert 1.99 <= found.low < 3.4 < 3.6 < found.high <= 5.01
    for test in (
        partial(claims.statistic_ratio, tiger, "listens", "good", "hazards"),
        partial(claims.metric_ratio, tiger, "listens", "good", "ms"),
    ):
        assert test(low=1.9).holds is True
        assert test(low=3.4).holds is None
        assert test(low=5.1).holds is False
    shares = [claims.covers(tiger, "good", level=0.9, tolerance=tolerance).holds for tolerance in (0.05, 0.025, 0.001)]
    assert shares == [True, None, False]


def test_few_seeds_have_no_interval_and_decide_nothing(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 40)
    for runs in tiger.agents.values():
        del runs[2], runs[3]
    assert str(statistics.mean(tiger)["listens"]) == "-11.0"
    assert str(statistics.improvement(tiger, "good", "listens")) == "1.00"
    claim = Claim("", "ours", "improves", {"agent": "good", "over": ["listens"]})
    assert str(claims.decide(claim, tiger.experiment, [tiger])) == "not decided so far (2 of 10 seeds)"


def test_curves_end_with_the_budget_of_an_agent(tiger: statistics.Results) -> None:
    curve = {"curve_step": np.array([0, 50]), "curve_return": np.array([[-11.0], [-11.0]])}
    values = statistics._interpolated(tiger, records.Record({"steps": 50}, curve), np.array([0, 50, 100]))
    assert np.array_equal(values, [0, 0, np.nan], equal_nan=True)


def test_curves_are_read_at_the_same_steps(tiger: statistics.Results) -> None:
    record = records.Record({"steps": 100}, {"train_step": np.array([1, 50, 100]), "train_return": np.array([1.0, 2.0, 4.0])})
    assert np.array_equal(statistics._binned(record, np.array([0, 50, 100])), [1.5, 4.0])
    assert np.allclose(statistics._sums(record, np.array([0, 50, 100])), [0.0, 0.003, 0.007])  # in thousands
    whole_rollouts = statistics._sums(record, np.array([0, 49, 98]))  # the last one ends after the budget
    assert np.allclose(whole_rollouts, [0.0, 0.001, 0.007])
    assert statistics.tail(record) == 4.0
    assert statistics.first(record) == 1.0
    endless = records.Record({"steps": 100}, {})  # many environments, few steps: no episode has ended
    assert np.isnan([statistics.tail(endless), statistics.first(endless), statistics.cumulative(endless)]).all()
    assert np.isnan(statistics._binned(endless, np.array([0, 50, 100]))).all()
    assert np.isnan(statistics._sums(endless, np.array([0, 50, 100]))).all()


def test_curves_of_few_seeds_have_no_intervals() -> None:
    scores = np.linspace(0, 1, 15).reshape(5, 1, 3)
    curve = statistics._curve(np.arange(3), {"few": scores[:2], "many": scores})
    assert np.isnan(curve.intervals["few"]).all()
    assert np.isfinite(curve.values["few"]).all()
    assert (curve.intervals["many"][0] < curve.intervals["many"][1]).all()


@pytest.mark.parametrize("n_runs", [1, 3, 4, 5, 10])
def test_estimates_are_those_of_rliable(n_runs: int) -> None:
    rng = np.random.default_rng(n_runs)
    x, y = rng.integers(4, size=(n_runs, 1)).astype(float), rng.integers(4, size=(7, 1)).astype(float)  # with ties
    assert statistics.probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))
    curves = rng.normal(size=(n_runs, 1, 4))
    found = statistics._curve(np.arange(4), {"agent": curves}).values["agent"]
    assert np.allclose(found, [metrics.aggregate_iqm(curves[..., step]) for step in range(4)])
    assert statistics.interquartile_mean(curves[..., 0]) == pytest.approx(metrics.aggregate_iqm(curves[..., 0]))


def test_speeds_are_medians_and_ratios_with_intervals(tiger: statistics.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 200)

    def runs(factor: float) -> dict[int, records.Record]:
        speeds = {f"metric_{name}": np.array(factor) for name in report.METRIC_UNITS}
        return {seed: records.Record({"memory_mb": factor * (9 + seed)}, speeds) for seed in range(3)}

    found = dataclasses.replace(tiger, agents={"BEN": runs(3.0), "RecurrentPPO": runs(2.0)})
    header, _, ben, base = report.speed_table(found).splitlines()
    assert header.endswith("memory of training (MB) |")
    assert ben.count("| 3.00 (1.50 [1.50, 1.50] x) ") == 4
    low, high = map(float, re.findall(r"30\.0 \(1\.50 \[(.+), (.+)\] x\)", ben)[0])
    assert 27 / 22 <= low < 1.5 < high <= 33 / 18
    assert base == "| RecurrentPPO | 2.00 | 2.00 | 2.00 | 2.00 | 20.0 |"


# ---------------------------------------------------------------------- files


def test_records_are_small_and_exact(tmp_path: Path) -> None:
    arrays = {"whole": np.array([-500, 3, 10]), "broken": np.array([0.5, 2.25]), "large": np.array([2.0**40])}
    records.write(tmp_path / "record", records.Record({"digest": "x"}, arrays))
    record = records.read(tmp_path / "record")
    assert record.meta == {"digest": "x"}
    assert {name: array.dtype for name, array in record.arrays.items()} == {
        "whole": np.int16,
        "broken": np.float32,
        "large": np.float64,
    }
    assert all(np.array_equal(record.arrays[name], array) for name, array in arrays.items())


def test_damaged_record_counts_as_missing(tmp_path: Path) -> None:
    job = job_of("BEN", 160)
    path = store.path_of(job, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert store.find(job, tmp_path) is None
    store.fold(tmp_path)
    assert running.missing([job], tmp_path) == [job]
    store.keep(records.Record({}), job, tmp_path)  # it is run again
    store.fold(tmp_path)
    assert running.missing([job], tmp_path) == []
    assert not path.parent.exists()


def test_records_in_one_file_are_what_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    steps = np.sort(rng.integers(1000, size=500))
    ends: dict[str, np.ndarray] = {"train_step": steps, "train_return": rng.integers(-500, 99, 500), "train_wins": steps % 7}
    curve = {"curve_step": np.array([0, 99]), "curve_return": rng.normal(size=(2, 3))}
    odd = {
        "metric_ms": np.array(0.1),
        "metric_nan": np.array(np.nan),
        "metric_none": np.array([]),
        "eval_return": np.array([2**40]),
    }
    arrays = {"a/b/c/1-x": ends | curve, "a/b/c/2-x": {"train_step": steps[:9], "train_return": np.arange(9) / 3} | odd, "d": {}}
    found = {key: records.Record({"digest": key, "times": {"cpu": 0.1}}, some) for key, some in arrays.items()}
    path = tmp_path / "all"
    archives.write(path, found)
    content = path.read_bytes()
    archives.write(path, dict(reversed(found.items())))
    assert path.read_bytes() == content
    assert archives.read_keys(path) == sorted(found)
    for key, record in archives.read(path).items():
        records.write(tmp_path / "one", found[key])
        alone = records.read(tmp_path / "one")
        assert record.meta == alone.meta
        assert list(record.arrays) == list(alone.arrays)
        for name, array in record.arrays.items():
            assert (array.dtype, array.shape) == (alone.arrays[name].dtype, alone.arrays[name].shape)
            assert np.array_equal(array, alone.arrays[name], equal_nan=True)


def keep_fakes(jobs: Iterable[Job], results: Path) -> None:
    """Write records that tell whose they are."""
    for job in jobs:
        store.keep(fake([0], job=job.name), job, results)


def test_who_looks_for_a_record_reads_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = EXPERIMENTS["tiger_learned"].jobs()
    keep_fakes(jobs, tmp_path)
    store.fold(tmp_path)
    monkeypatch.setattr(archives, "read", None)
    assert running.missing(jobs, tmp_path) == []
    places = Places(tmp_path, tmp_path / "work")
    assert [running.share_done(job, places) for job in jobs] == [1.0] * len(jobs)


def test_folding_replaces_what_is_outdated_and_drops_what_is_gone(tmp_path: Path) -> None:
    experiment = load_all()["tiger_learned"]
    jobs = [job for job in experiment.jobs() if job.seed in (100, 101)]
    old = [dataclasses.replace(job, experiment=dataclasses.replace(experiment, steps=7)) for job in jobs]
    more = Job(dataclasses.replace(experiment, steps=7), "Tiger", "BEN", 999)  # as of `run --seeds`
    gone = Job(dataclasses.replace(experiment, agents={"gone": Agent("ben", {"tau": 0.5})}), "Tiger", "gone", 100)
    renamed = Job(dataclasses.replace(experiment, agents={"renamed": experiment.agents["BEN"]}), "Tiger", "renamed", 105)
    unknown = dataclasses.replace(gone, experiment=dataclasses.replace(gone.experiment, name="unknown"))
    keep_fakes([*old, more, gone, renamed, unknown], tmp_path)
    store.fold(tmp_path)
    assert set(store.keys(tmp_path)) == set(map(store.key_of, [*old, more, renamed, unknown]))
    keep_fakes(jobs[1:], tmp_path)
    store.fold(tmp_path)
    assert set(store.keys(tmp_path)) == set(map(store.key_of, [old[0], *jobs[1:], more, renamed, unknown]))


def test_the_newer_of_two_single_records_is_kept(tmp_path: Path) -> None:
    job = job_of("BEN", 160)
    first = dataclasses.replace(job, experiment=dataclasses.replace(job.experiment, steps=161))
    keep_fakes([first, job], tmp_path)
    os.utime(store.path_of(first, tmp_path), (1, 1))
    store.fold(tmp_path)
    assert store.keys(tmp_path) == [store.key_of(job)]


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Threads here, whose locks are as much of each other's as those of processes."""
    experiment = dataclasses.replace(EXPERIMENTS["tiger_learned"], seeds=8)
    jobs = [job for job in experiment.jobs() if job.seed is not None]

    def write(some: Sequence[Job]) -> None:
        for job in some:
            keep_fakes([job], tmp_path)
            assert store.has(job, tmp_path)
            store.fold(tmp_path)
            assert store.has(job, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (jobs[i::4] for i in range(4))))
    found = [store.find(job, tmp_path) for job in jobs]
    assert [record and record.meta["job"] for record in found] == [job.name for job in jobs]
    assert {path.name for path in tmp_path.iterdir()} == {store.LOCK, "tiger_learned.npy.xz"}


def test_killed_while_folding_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = EXPERIMENTS["tiger_learned"].jobs()

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    for where in ("_write", "_remove"):  # before and after the records are in the one file
        keep_fakes(jobs, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(store, where, die)
            with pytest.raises(KeyboardInterrupt):
                store.fold(tmp_path)
        assert running.missing(jobs, tmp_path) == []
        store.fold(tmp_path)
        assert set(store.keys(tmp_path)) == set(map(store.key_of, jobs))
        assert not list(tmp_path.rglob(f"*{records.SUFFIX}"))


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:20], lambda x: x[:-20], lambda x: x[:-40] + b"." + x[-39:]])
def test_damaged_file_of_an_experiment_is_not_written_over(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    jobs = EXPERIMENTS["tiger_learned"].jobs()
    keep_fakes(jobs[:-1], tmp_path)
    store.fold(tmp_path)
    path = store.archive_of("tiger_learned", tmp_path)
    path.write_bytes(damaged := damage(path.read_bytes()))
    keep_fakes(jobs[-1:], tmp_path)
    with pytest.raises(ValueError, match="is damaged"):
        store.fold(tmp_path)
    assert path.read_bytes() == damaged
    assert store.path_of(jobs[-1], tmp_path).exists()
    with pytest.raises(ValueError, match="is damaged"):
        store.find(jobs[0], tmp_path)


def test_interrupted_run_leaves_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(todo: Sequence[Job], *args: Any) -> list[str]:
        keep_fakes(todo[:2], tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run", interrupted)
    keep_fakes(jobs := EXPERIMENTS["tiger_learned"].jobs()[:1], tmp_path)  # of a run that could not even do that
    assert main(("run", "tiger_learned", "--smoke", "--results", str(tmp_path))) == 130
    assert len(store.keys(tmp_path)) == 3
    assert running.missing(jobs, tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {store.LOCK, "tiger_learned.npy.xz"}


def test_records_that_are_forgotten_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = EXPERIMENTS["tiger_learned"].jobs()
    keep_fakes(jobs, tmp_path)
    store.fold(tmp_path)
    keep_fakes(jobs[-1:], tmp_path)
    arguments = ("forget", "tiger_learned", "--smoke", "--results", str(tmp_path), "--agents", jobs[-1].agent)
    assert main(arguments) == 0
    assert "1 records removed" in capsys.readouterr().out
    assert running.missing(jobs, tmp_path) == jobs[-1:]
    assert main(arguments[:-2]) == 0
    assert running.missing(jobs, tmp_path) == jobs
    assert store.keys(tmp_path) == []


def test_fingerprints_do_not_tell_where_things_are() -> None:
    job = job_of("RecurrentPPO", 160)
    moved = copy.deepcopy(job.configuration())
    (wrapper,) = moved["hyperparams"]["env_wrapper"]
    moved["hyperparams"]["env_wrapper"] = [{"sb3_ben.elsewhere.PreviousActionReward": next(iter(wrapper.values()))}]
    assert digest_of(moved) == job.digest()
    moved["hyperparams"]["env_wrapper"] = [{"sb3_ben.history.wrappers.Another": next(iter(wrapper.values()))}]
    assert digest_of(moved) != job.digest()


def test_jobs_that_differ_in_their_labels_alone_share_a_record(tmp_path: Path) -> None:
    job, longer = job_of("BEN", 160), job_of("BEN", 168)
    experiment = dataclasses.replace(job.experiment, name="another", agents={"the same": job.experiment.agents["BEN"]})
    same = dataclasses.replace(job, experiment=experiment, agent="the same")
    assert running.missing([job, same, longer], tmp_path) == [job, longer]
    records.write(store.path_of(job, tmp_path), records.Record({"found": 1}))
    found = store.find(same, tmp_path)
    assert found is not None
    assert found.meta == {"found": 1}
    assert running.missing([job, same, longer], tmp_path) == [longer]
    assert store.outdated(longer, tmp_path) == [store.key_of(job)]
    assert store.outdated(same, tmp_path) == []
    store.fold(tmp_path)
    assert store.find(same, tmp_path) is not None
    assert running.missing([job, same, longer], tmp_path) == [longer]
    assert store.outdated(longer, tmp_path) == [store.key_of(job)]


def test_records_that_other_experiments_need_are_not_outdated(tmp_path: Path) -> None:
    experiment = load_all()["tiger_learned"]
    job = next(job for job in experiment.jobs() if job.agent == "BEN")
    changed = dataclasses.replace(job, experiment=dataclasses.replace(experiment, steps=7))
    records.write(store.path_of(job, tmp_path), records.Record({}))
    assert store.outdated(changed, tmp_path) == []
    store.keep(records.Record({}), changed, tmp_path)
    store.fold(tmp_path)
    assert store.keys(tmp_path) == sorted(map(store.key_of, (job, changed)))


def test_learned_beliefs_are_learned_once_for_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def learn(config: Any, seed: int, code: str, **kwargs: Any) -> Any:
        calls.append((seed, code))
        return priors.learned_belief(config, **kwargs)

    monkeypatch.setattr(priors, "_learned_once", joblib.Memory(tmp_path, verbose=0).cache(learn))
    env = make_vec("SearchAndRescue-v0", 2, grid_size=3, n_victims=1, n_hazards=1)

    def first_weights(seed: int) -> th.Tensor:
        model = BEN("MlpPolicy", env, seed=seed, prior=priors.rescue_learned(n_episodes=20, n_steps=2, n_anchors=2))
        assert model.known.belief is not None
        return next(model.policy.q_net.parameters())

    learned_now, learned_before, other_seed = (first_weights(seed) for seed in (0, 0, 1))
    assert len(calls) == 2
    assert th.equal(learned_now, learned_before)  # an agent does not depend on what a cache holds
    assert not th.equal(learned_now, other_seed)
    monkeypatch.setattr(priors, "code", lambda: "another")
    first_weights(1)
    assert len(calls) == 3  # what was learned by other code is of no use


def test_environments_of_others_have_fixed_scales_and_no_references() -> None:
    experiment = EXPERIMENTS["cart_pole"]
    assert all(job.seed is not None for job in experiment.jobs())
    run = records.Record({}, {"eval_return": np.array([250.0])})
    results = statistics.Results(experiment, "CartPole", {"BEN": {100: run}}, {})
    assert results.normalised(results.greedy(run)) == 0.5


def test_references_belong_to_their_environments() -> None:
    references = {(job.environment, job.agent) for job in load_all()["exploration"].jobs() if job.seed is None}
    assert ("Tiger", "always listens") in references
    assert ("bandit", "random") in references
    assert ("bandit", "always listens") not in references


def test_failing_job_is_reported_and_leaves_no_record(tmp_path: Path) -> None:
    job = job_of("BEN", 160)
    agents = {"BEN": Agent("ben", {"tau": 2.0})}
    job = dataclasses.replace(job, experiment=dataclasses.replace(job.experiment, agents=agents))
    error = run_job(job, Places(tmp_path / "results", tmp_path / "work"))
    assert error is not None
    assert "`tau` must lie between 0 and 1" in error
    assert store.find(job, tmp_path / "results") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seeds: 0", "must be at least 1"),
        ("first_seed: 99", "seeds below are for tuning"),
        ("metrics: [speeed]", "no metric is called 'speeed'"),
        ("references: [nobody]", "no reference is called 'nobody'"),
        ("claims: [{text: x, source: ours, test: guess}]", "no test is called 'guess'"),
        ("claims: [{text: x, source: ours, test: improves, agent: BEN, over: [DQM]}]", "no agent of a claim is called 'DQM'"),
        ("score: best", "no score is called 'best'"),
        ("smoke: {stepps: 1}", "unknown fields stepps"),
        ("stepps: 1", "stepps"),
    ],
)
def test_misspelt_experiments_are_refused(change: str, message: str, tmp_path: Path) -> None:
    declared = yaml.safe_load((FOLDER / "tiger_learned.yml").read_text())
    (tmp_path / "mine.yml").write_text(yaml.safe_dump({**declared, **yaml.safe_load(change)}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "mine.yml")


def test_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("run", "tiger_lerned"))
    assert "do you mean 'tiger_learned'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "tiger_learned", "--jobs", "-5"),
        ("run", "tiger_learned", "--seeds", "0"),
        ("run", "tiger_learned", "--checkpoint-seconds", "-1"),
        ("run", "tiger_learned", "--agents", "DQM"),
        ("report", "--results", "nowhere"),
    ],
)
def test_impossible_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)


def test_page_of_smoke_versions_is_beside_their_results(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "REPS", 20)
    before = PAGE.read_text()
    assert main(("report", "--smoke", "--results", str(results))) == 0
    assert (results / "benchmarks.md").exists()
    assert PAGE.read_text() == before


def test_seeds_of_tests_are_not_those_of_tuning() -> None:
    assert SEED_STRIDE * N_TUNING_SEEDS < TUNING_EVALUATION_SEED < EVALUATION_SEED < SEED_STRIDE * FIRST_TEST_SEED
    assert tuning.Trial("ben", "Tiger-v0", 160, 0, "").job(8).configuration()["evaluation_seed"] == TUNING_EVALUATION_SEED
    for experiment in load_all().values():
        seeds = {job.zoo_seed for job in experiment.jobs() if job.seed is not None}
        assert min(seeds) >= 100_000
        assert all(other - seed >= 1000 for seed, other in pairwise(sorted(seeds)))


def test_overrides_are_merged_with_the_policy_of_the_file() -> None:
    job = Job(
        dataclasses.replace(
            EXPERIMENTS["tiger_learned"], agents={"a": Agent("ppo_lstm", {"policy_kwargs": {"lstm_hidden_size": 8}})}
        ),
        "Tiger",
        "a",
        100,
    )
    kwargs = job.hyperparams()["policy_kwargs"]
    assert kwargs["lstm_hidden_size"] == 8
    assert "net_arch" in kwargs
    assert "net_arch" in job.configuration()["hyperparams"]["policy_kwargs"]  # a change in the zoo's file is another job


def test_agents_may_train_longer_and_in_other_worlds_than_they_are_evaluated_in(tmp_path: Path) -> None:
    agents = {"a": Agent("ben", steps=200, env_kwargs={"sigma_noise": 0.3}), "b": Agent("ben")}
    experiment = dataclasses.replace(EXPERIMENTS["rescue_zero_shot"], agents=agents)
    jobs = [Job(experiment, "7x7", agent, 100) for agent in agents]
    assert [job.steps for job in jobs] == [200, experiment.steps]
    for job, sigma in zip(jobs, (0.3, 0.1), strict=True):
        manager = training.Manager(job, tmp_path, None)
        manager._hyperparams = {}
        assert manager.n_timesteps == job.steps
        for is_evaluation, expected in ((False, sigma), (True, 0.1)):
            worlds = manager.create_envs(1, eval_env=is_evaluation)
            assert worlds.get_attr("world")[0].config.sigma_noise == expected
    assert jobs[0].digest() != jobs[1].digest()


def test_smoke_versions_change_priors_and_add_none() -> None:
    agents = EXPERIMENTS["rescue_zero_shot"].agents
    assert agents["BEN"].hyperparams["prior"]["n_episodes"] == 40
    assert agents["BEN without history"].hyperparams["prior"] is None
    assert "prior" not in agents["RecurrentPPO"].hyperparams


def test_variants_of_the_paper_have_the_hyperparameters_of_ben(tmp_path: Path) -> None:
    from sb3_ben.ben.paper import PaperBEN

    jobs = {job.agent: job for job in EXPERIMENTS["objectives"].jobs() if job.seed is not None}
    paper, ben = jobs["ELBO as printed"], jobs["BEN"]
    assert paper.zoo_entry() == ben.zoo_entry()
    assert paper.cpu_seconds == ben.cpu_seconds
    assert paper.hyperparams() == ben.hyperparams() | {"elbo": "paper", "msbbe": "semi", "belief_scope": "run"}
    setup = training.Manager(paper, tmp_path, None).setup_experiment()
    assert setup is not None
    assert type(setup[0]) is PaperBEN
    assert setup[0].gamma == ben.zoo_entry()["gamma"]


def tune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trials: Path, *arguments: str) -> list[str]:
    """The lines that a small call of benchmarks.tuning prints."""
    small = ["--algo", "bootdqn", "--env", "Tiger-v0", "--steps", "256", "--episodes", "8", "--trials", str(trials)]
    monkeypatch.setattr("sys.argv", ["tuning", *small, *arguments])
    tuning.main()
    return capsys.readouterr().out.splitlines()


def test_tuning_tries_each_of_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tune(capsys, monkeypatch, tmp_path / "trials.csv", "--options", "", "gamma=0.5")[-2:]
    assert {row.rpartition(": ")[2] for row in rows} == {"as they are", "gamma=0.5"}
    assert all(-500 * 11 <= float(row.split()[2]) <= 110 for row in rows)


def test_tuning_goes_on_where_it_was(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials = tmp_path / "trials.csv"
    tune(capsys, monkeypatch, trials, "--search", "1")
    lines = tune(capsys, monkeypatch, trials, "--search", "2", "--options", "")
    assert [line.split(":")[0] for line in lines if " of " in line] == ["1 of 2", "2 of 2"]
    assert len(trials.read_text().splitlines()) == 1 + 3
    scores = [float(line.split()[2]) for line in lines[-3:]]
    assert scores == sorted(scores, reverse=True)


def test_random_search_draws_the_same_options_again_and_none_twice() -> None:
    first = tuning.drawn("ppo_lstm", "Tiger-v0", 30)
    assert tuning.drawn("ppo_lstm", "Tiger-v0", 40)[:30] == first
    assert len(set(first)) == 30
    assert tuning.drawn("ppo_lstm", "CartPole-v1", 30) != first


def test_published_results_belong_to_the_experiments() -> None:
    """Raw files of experiments that have been renamed or of agents that are gone would be dead weight."""
    known = {job.digest() for experiment in load_all().values() for job in experiment.jobs()}
    assert {store.fingerprint(key) for key in store.keys(RESULTS)} <= known


@pytest.mark.parametrize("name", ["README.md", "docs/algorithm.md"])
def test_intervals_in_the_documentation_are_those_of_the_page(name: str) -> None:
    """Numbers that are copied by hand stay behind when experiments are run again."""
    copied, known = (
        set(re.findall(r"-?[\d.]+\s\[-?[\d.]+,\s-?[\d.]+\]", path.read_text(encoding="utf-8")))
        for path in (PAGE.parent.parent / name, PAGE)
    )
    assert copied
    assert not {" ".join(interval.split()) for interval in copied} - known


CONFORMANCE = """
import pytest
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DQN, PPO


@pytest.mark.parametrize("model_class", [PPO, DQN])
def test_class(model_class):
    model = model_class("MlpPolicy", "CartPole-v1").learn(16)
    assert model.policy.rnn_type == "lstm"


def test_recurrent():
    kwargs = dict(lstm_hidden_size=4, enable_critic_lstm=False)
    model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=16, policy_kwargs=kwargs).learn(16)
    assert model.policy.rnn_hidden_size == 4


def test_performance_her():
    DQN("MlpPolicy", "Pendulum-v1")


def test_others():
    PPO("MlpPolicy", "no such environment")
"""


def test_conformance_runs_the_tests_of_others_with_ben(tmp_path: Path) -> None:
    file = tmp_path / "test_theirs.py"
    file.write_text(CONFORMANCE)
    command = [sys.executable, "-m", "benchmarks.conformance", str(file)]
    run = subprocess.run(command, cwd=FOLDER.parent.parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed, 3 deselected" in run.stdout
