"""rl-zoo3's way to the Hugging Face Hub and back, with the Hub replaced by a folder and a server on this machine."""

from __future__ import annotations

import hashlib
import runpy
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import HfApi, constants
from rl_zoo3 import utils

from sb3_ben import BEN
from sb3_ben.history.previous_reward import attach_reward
from sb3_ben.zoo import register
from sb3_ben.zoo.hub import mend_hub

REPO = "somebody/ben-Tiger-v0"
SMALL = ("-n", "64", "-params", "n_envs:2", "learning_starts:8", "batch_size:4")


def run_script(script: str, *args: str) -> None:
    """``python -m rl_zoo3.SCRIPT ARGS`` in this process and folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *args])
        sys.modules.pop(f"rl_zoo3.{script}", None)
        runpy.run_module(f"rl_zoo3.{script}", run_name="__main__")


class Handler(SimpleHTTPRequestHandler):
    """The part of the Hub's protocol that downloads need."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.replace("/resolve/main", ""))

    def end_headers(self) -> None:
        file = Path(self.translate_path(self.path))
        if file.is_file():
            self.send_header("ETag", f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"')
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        """Be quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is uploaded ends in this folder, and downloads come from it."""
    register()
    folder = tmp_path / "hub_server"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"

    def upload_folder(self: HfApi, repo_id: str, folder_path: Path, **_: Any) -> None:
        shutil.copytree(folder_path, folder / repo_id)

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: f"{endpoint}/{repo_id}")
    monkeypatch.setattr(HfApi, "snapshot_download", lambda self, local_dir, **_: Path(local_dir).mkdir(parents=True))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")
    monkeypatch.chdir(tmp_path)
    yield folder
    server.shutdown()
    server.server_close()


def test_an_agent_goes_to_the_hub_and_comes_back(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ("--algo", "ben", "--env", "Tiger-v0")
    run_script("train", *name, "-f", "logs", "--eval-freq", "32", "--eval-episodes", "2", *SMALL)
    run_script("push_to_hub", *name, "-f", "logs", "-orga", "somebody", "--no-render")
    assert {"README.md", "ben-Tiger-v0.zip", "config.yml", "results.json"} <= {file.name for file in (hub / REPO).iterdir()}

    _, header, card = (hub / REPO / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert "Tiger-v0" in metadata["tags"]
    result = metadata["model-index"][0]
    assert result["name"] == "BEN"
    assert result["results"][0]["metrics"][0]["type"] == "mean_reward"
    assert "**BEN** Agent playing **Tiger-v0**" in card
    assert "python -m rl_zoo3.load_from_hub --algo ben --env Tiger-v0 -orga somebody" in card
    assert 'pip install "sb3_ben[zoo]"' in card
    assert "pip install rl_zoo3" not in card

    run_script("load_from_hub", *name, "-f", "downloads", "-orga", "somebody")
    assert "No normalization file" in capsys.readouterr().out
    models = [BEN.load(utils.get_model_path(0, folder, "ben", "Tiger-v0")[1]) for folder in ("logs", "downloads")]
    assert_same_predictions(*models)
    run_script("enjoy", *name, "-f", "downloads", "--no-render", "-n", "23")
    assert "2 Episodes" in capsys.readouterr().out


def assert_same_predictions(one: BEN, other: BEN) -> None:
    """In eight steps of five episodes."""
    rng = np.random.default_rng(0)
    states: list[Any] = [None, None]
    for _ in range(8):
        observation: Any = attach_reward(rng.integers(3, size=5), rng.normal(size=5).astype(np.float32))
        results = [
            model.predict(observation, state, deterministic=True) for model, state in zip((one, other), states, strict=True)
        ]
        states = [state for _, state in results]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        for part, same_part in zip(*states, strict=True):
            np.testing.assert_array_equal(part, same_part)


def test_mending_again_changes_nothing() -> None:
    mend_hub()
    package, push = (import_module(name) for name in ("huggingface_sb3", "huggingface_sb3.push_to_hub"))
    before = package.load_from_hub, push.generate_metadata
    mend_hub()
    assert before == (package.load_from_hub, push.generate_metadata)
