"""``python -m sb3_ben.zoo train ...``: the scripts of rl-zoo3 with this package registered, without the start-up hook."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys

SCRIPTS = ("train", "enjoy", "record_video", "record_training", "push_to_hub", "load_from_hub")


def main() -> None:
    """Register, then run a script of rl-zoo3 with the remaining arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m sb3_ben.zoo", description="Run a script of rl-zoo3 with the algorithms of sb3_ben.", add_help=False
    )
    parser.add_argument("script", choices=SCRIPTS, help="script of rl-zoo3; `SCRIPT --help` shows its own arguments")
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        parser.print_help()
        return
    script = parser.parse_args(sys.argv[1:2]).script
    if importlib.util.find_spec("rl_zoo3") is None:
        parser.error('rl-zoo3 is not installed: pip install "sb3_ben[zoo]"')

    from sb3_ben.zoo import register

    register()
    del sys.argv[1]
    runpy.run_module(f"rl_zoo3.{script}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
