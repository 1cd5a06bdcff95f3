"""The comparison as a user runs it: three algorithms through the zoo, TensorBoard, a screenshot."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import compare, screenshot

pytestmark = pytest.mark.xdist_group("compare")  # one process, since all look at one comparison
ARGS = ("--seeds", "1", "--steps", "110", "--eval-episodes", "2", "--jobs", "1", "--hyperparams", "n_envs:2", "--no-serve")


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison of all three algorithms."""
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "N_PICTURES", 1)
        assert compare.main([*ARGS, "--logdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def tensorboard(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows it."""
    command = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--logdir", str(logdir / "Tiger-v0" / "tensorboard")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        matches = (re.search(r"http://\S+/", line) for line in process.stderr)
        yield next(match[0] for match in matches if match is not None)
        process.terminate()


def get(url: str, until: Any) -> Any:
    """The answer of a server, as soon as it is complete: it reads its files in the background."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(url) as response:
            answer = json.load(response)
        if until(answer) or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)


def test_curves_share_tags_and_steps(tensorboard: str) -> None:
    runs = {"ben-0", "ppo_lstm-0", "bootdqn-0", "oracle"}
    shared = {"eval/mean_reward", "rollout/ep_rew_mean", "episode/golds", "episode/tigers", "episode/listens"}

    def is_complete(tags: dict[str, dict[str, Any]]) -> bool:
        return tags.keys() == runs and all(shared <= tags[run].keys() for run in runs)

    tags = get(f"{tensorboard}data/plugin/scalars/tags", is_complete)
    assert set(tags) == runs
    for run in runs:
        assert shared <= tags[run].keys(), run
    assert "oracle/return" in tags["oracle"]
    last = {}
    for run in runs:
        url = f"{tensorboard}data/plugin/scalars/scalars?run={run}&tag=eval/mean_reward"
        last[run] = get(url, lambda events: events and events[-1][1] >= 100)[-1]
    assert all(100 <= step <= 132 for _, step, _ in last.values()), "RecurrentPPO ends with its third rollout of 44 steps"
    assert last["oracle"][2] == pytest.approx(74.52, abs=0.01)


def test_charts_and_pictures_are_there(tensorboard: str) -> None:
    layout = get(f"{tensorboard}data/plugin/custom_scalars/layout", bool)
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in layout["category"][0]["chart"]}
    assert {"return", "golds", "tigers", "listens", "uncertainty"} <= charts.keys()
    assert "oracle/return" in charts["return"]
    pictures = {"belief/density", "belief/spread", "belief/episode"}
    images = get(f"{tensorboard}data/plugin/images/tags", lambda tags: pictures <= tags.get("ben-0", {}).keys())
    assert images["ben-0"].keys() == pictures


def test_complete_runs_are_not_trained_again(
    logdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.Run, "command", lambda run: [sys.executable, "-c", "raise SystemExit('trained again')"])
    assert compare.main([*ARGS, "--logdir", str(logdir)]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 runs are complete" in out
    assert re.search(r"oracle +74.52", out)
    run = compare.Run("ben", "Tiger-v0", 0, 110, 2, ("n_envs:2",), logdir / "Tiger-v0")
    assert run.is_complete()
    assert not dataclasses.replace(run, steps=120).is_complete()
    assert not dataclasses.replace(run, seed=1).is_complete()
    monkeypatch.setattr(compare, "hyperparams", lambda algo, env_id: {"gamma": 0.5})
    assert not run.is_complete(), "its hyperparameters have changed since"


def test_a_failure_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare.Run, "command", lambda run: [sys.executable, "-c", "raise SystemExit('no [memory] left')"])
    assert compare.main([*ARGS, "--logdir", str(tmp_path), "--algos", "ben"]) == 1
    assert "no [memory] left" in capsys.readouterr().out


def test_an_interrupt_ends_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(popen(*args, **kwargs))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return started[-1]

    monkeypatch.setattr(compare.subprocess, "Popen", start)
    monkeypatch.setattr(compare.Run, "command", lambda run: [sys.executable, "-c", "import time; time.sleep(60)"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background processes ignore
    try:
        assert compare.main([*ARGS, "--logdir", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1, "those that wait do not start"
    assert started[0].poll() == -signal.SIGTERM
    assert "goes on from here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--algos", "bne"), "no algorithm is called 'bne', do you mean 'ben'?"),
        (("--env", "Tigre-v0"), "no environment is called 'Tigre-v0', do you mean 'Tiger-v0'?"),
        (("--algos", "tqc"), "there are no hyperparameters of tqc for Tiger-v0"),
        (("--seeds", "0"), "--seeds must be at least 1"),
    ],
)
def test_mistakes_are_explained(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = compare.hyperparams
    monkeypatch.setattr(compare, "hyperparams", lambda algo, env_id: {} if algo == "tqc" else known(algo, env_id))
    monkeypatch.setattr(compare.Trainer, "train", lambda trainer, runs: pytest.fail("it has not noticed"))
    with pytest.raises(SystemExit):
        compare.main(args)
    assert message in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        compare.main([])
    assert 'pip install "sb3_ben[zoo]"' in capsys.readouterr().err


# ---------------------------------------------------------------------- the screenshot


@pytest.mark.skipif(screenshot.find_browser() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_screenshot(tensorboard: str, tmp_path: Path) -> None:
    browser = screenshot.find_browser()
    assert browser is not None
    screenshot.wait_for_runs(tensorboard)
    screenshot.take_screenshot(browser, f"{tensorboard}#custom_scalars", tmp_path / "shot.png", (800, 600))
    with Image.open(tmp_path / "shot.png") as picture:
        assert picture.size == (800, 600)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=2**24)}
    assert (245, 124, 0) in colours, "TensorBoard's orange bar"
    assert len(colours) > 200, "there is text, and there are curves"


def test_no_browser_is_no_error(logdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(screenshot.shutil, "which", lambda name: None)
    assert screenshot.main(["--logdir", str(logdir)]) == 0
    assert "No screenshot was taken: there is no Chromium, and no apt-get" in capsys.readouterr().out


def test_nothing_to_show_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        screenshot.main(["--logdir", str(tmp_path)])
    assert "benchmarks.compare" in capsys.readouterr().err
