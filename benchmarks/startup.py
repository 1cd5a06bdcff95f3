"""What the start-up hook for rl-zoo3 costs a Python process that has nothing to do with it.

python -m benchmarks.startup [--runs 200]

Two fresh virtual environments, one with this package installed by pip and one empty, start an empty program in turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("sb3_ben", "hyperparams", "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
LIMIT = 3.0  # milliseconds
# This very environment builds and installs, without a look at a package index
OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")


def copy_sources(folder: Path) -> Path:
    """Copy all that the package is built from, so that building leaves nothing in the repository."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(sources: Path, folder: Path) -> Path:
    """Build what ``pip install`` would install."""
    command = ("wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob("*.whl"))


def make_venv(folder: Path) -> tuple[Path, Path]:
    """Create an empty virtual environment; return its interpreter and its site-packages."""
    venv.create(folder, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout.strip()
    return python, Path(purelib)


def install(python: Path, wheel: Path) -> None:
    """Install a wheel into another environment."""
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *OFFLINE, str(wheel)], check=True)


def start_up(pythons: list[Path], runs: int) -> list[list[float]]:
    """Milliseconds that each interpreter takes to start and end, by turns."""
    times: list[list[float]] = [[] for _ in pythons]
    for _ in range(runs):
        for python, taken in zip(pythons, times, strict=True):
            start = time.perf_counter()
            subprocess.run([python, "-c", "pass"], check=True)
            taken.append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the start-up hook for an unrelated Python process.")
    parser.add_argument("--runs", type=int, default=200, help="number of times each interpreter is started")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (without, _), (with_hook, _) = make_venv(folder / "without"), make_venv(folder / "with")
        install(with_hook, build_wheel(copy_sources(folder / "sources"), folder / "wheels"))
        before, after = start_up([without, with_hook], args.runs)
    differences = [a - b for a, b in zip(after, before, strict=True)]
    print(f"start-up without sb3_ben: {statistics.median(before):6.2f} ms (median of {args.runs} runs)")
    print(f"start-up with sb3_ben:    {statistics.median(after):6.2f} ms")
    print(f"difference:               {statistics.median(differences):6.2f} ms (median of pairs; at most {LIMIT:.0f} allowed)")


if __name__ == "__main__":
    main()
