"""What setup.cfg cannot say: the hyperparameters and the start-up hook for rl-zoo3 belong to the installed package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
HOOK = "_sb3_ben_zoo"


def write_hook(site_packages: str | os.PathLike[str]) -> list[str]:
    """Write the hook and the line that Python runs at its start; return the names of the files."""
    files = {
        f"{HOOK}.py": (ROOT / "sb3_ben" / "zoo" / "_hook.py").read_text(encoding="utf-8"),
        f"{HOOK}.pth": f"import {HOOK}; {HOOK}.install()\n",
    }
    for name, text in files.items():
        Path(site_packages, name).write_text(text, encoding="utf-8")
    return list(files)


class BuildWithZoo(build_py):
    """Adds the hook and ``hyperparams/*.yml`` (as ``sb3_ben/hyperparams/*.yml``) to the build."""

    _extra_files: tuple[str, ...] = ()

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the folder of the repository is used, and the hook comes from EditableWithZoo
            return
        hyperparams = Path(self.build_lib, "sb3_ben", "hyperparams")
        hyperparams.mkdir(parents=True, exist_ok=True)
        files = [str(Path(self.build_lib, name)) for name in write_hook(self.build_lib)]
        for source in sorted((ROOT / "hyperparams").glob("*.yml")):
            self.copy_file(str(source), str(hyperparams / source.name))
            files.append(str(hyperparams / source.name))
        self._extra_files = tuple(files)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._extra_files]


class EditableWithZoo(editable_wheel):
    """Adds the hook to what ``pip install -e`` puts into site-packages."""

    def _run_build_commands(self, dist_name: str, unpacked_wheel: Any, build_lib: Any, tmp_dir: Any) -> Any:
        outputs = super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)
        write_hook(unpacked_wheel)
        return outputs


setup(cmdclass={"build_py": BuildWithZoo, "editable_wheel": EditableWithZoo})
