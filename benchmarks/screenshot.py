"""A screenshot of TensorBoard for the documentation, of what ``benchmarks.compare`` has written.

python -m benchmarks.screenshot [--logdir results/compare/Tiger-v0/tensorboard] [--output docs/images/tensorboard.png]

It needs Chromium, and tries to install Debian's package where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import start_tensorboard

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DASHBOARDS = ("custom_scalars", "timeseries", "scalars", "images")
PATIENCE = 60  # seconds
VIRTUAL_TIME = 30_000  # milliseconds of the page's clock, which runs ahead while nothing is loading


class NoBrowserError(RuntimeError):
    """There is no Chromium and none can be installed; the message says why."""


def find_browser() -> str | None:
    """The path of an installed Chromium."""
    return next((path for path in map(shutil.which, BROWSERS) if path is not None), None)


def install_browser() -> str:
    """Install Debian's Chromium where that is possible; return its path."""
    if shutil.which("apt-get") is None:
        raise NoBrowserError("there is no Chromium, and no apt-get to install it with")
    if os.geteuid() != 0:
        raise NoBrowserError("there is no Chromium, and only root can install it: apt-get install chromium")
    print("Installing Chromium ...", flush=True)
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        result = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True, check=False)
    browser = find_browser()
    if browser is None:
        raise NoBrowserError(
            f"there is no Chromium, and it cannot be installed: {(result.stderr or result.stdout).strip()[-500:]}"
        )
    return browser


def wait_for_runs(url: str) -> list[str]:
    """The runs that TensorBoard shows, once it has read them."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}data/runs") as response:
            runs = json.load(response)
        if runs:
            return runs
        time.sleep(0.5)
    raise TimeoutError(f"TensorBoard has found no runs in {PATIENCE} seconds")


def take_screenshot(browser: str, url: str, output: Path, size: tuple[int, int]) -> None:
    """Open a page in a browser that nobody sees, and save what it shows."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless=new",
            "--no-sandbox",  # which Chromium insists on where root runs it
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            f"--virtual-time-budget={VIRTUAL_TIME}",
            f"--screenshot={output.resolve()}",
            url,
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)
    if result.returncode != 0 or not output.is_file():
        raise RuntimeError(f"{browser} has taken no screenshot: {result.stderr.strip()[-500:]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logdir", type=Path, default=Path("results/compare/Tiger-v0/tensorboard"))
    parser.add_argument("--output", type=Path, default=Path("docs/images/tensorboard.png"))
    parser.add_argument("--dashboard", choices=DASHBOARDS, default=DASHBOARDS[0])
    parser.add_argument("--size", type=int, nargs=2, default=(1500, 800), metavar=("WIDTH", "HEIGHT"))
    args = parser.parse_args(argv)
    if not any(args.logdir.rglob("events.out.tfevents.*")):
        parser.error(f"there is nothing to show in {args.logdir}: run `python -m benchmarks.compare --no-serve` first")
    try:
        browser = find_browser() or install_browser()
    except NoBrowserError as error:
        print(f"No screenshot was taken: {error}.")
        return 0
    url = start_tensorboard(args.logdir, port=0)
    wait_for_runs(url)
    take_screenshot(browser, f"{url}#{args.dashboard}", args.output, tuple(args.size))
    print(f"The screenshot is {args.output.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
