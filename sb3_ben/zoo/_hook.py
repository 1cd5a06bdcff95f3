"""Registers sb3_ben with rl-zoo3 in any Python process that imports rl-zoo3, and does nothing in all others.

Installation copies this file into site-packages as ``_sb3_ben_zoo.py``, beside a ``.pth`` file that imports it when Python
starts. That is why it stands alone: it imports nothing that Python has not loaded by then (no ``__future__``, no ``typing``) and
does no harm when the package itself is broken or gone. ``SB3_BEN_NO_ZOO=1`` switches it off.
"""

import os
import sys

TYPE_CHECKING = False  # type checkers know the name, with or without typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODULES = ("rl_zoo3.utils", "rl_zoo3.exp_manager")  # those that `sb3_ben.zoo.extend` has something to add to


class ZooFinder:
    """Finds modules as the finders after it do, and has those of rl-zoo3 extended as soon as they are loaded."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in MODULES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for spec in (finder.find_spec(name, path, target) for finder in finders) if spec), None)
        if spec is not None and spec.loader is not None:
            extend_when_loaded(spec)
        return spec


def extend_when_loaded(spec: "ModuleSpec") -> None:
    """Have a module extended at the end of its execution, before whoever imports it takes names from it."""
    loader = spec.loader
    execute = loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        extend_or_warn(module)

    loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]


def extend_or_warn(module: "ModuleType") -> None:
    """Extend a module of rl-zoo3; whatever goes wrong, rl-zoo3 goes on without sb3_ben."""
    try:
        from sb3_ben.zoo import extend

        extend(module)
    except Exception as error:
        import warnings

        uninstall()  # one warning is enough
        warnings.warn(f"sb3_ben is not available in rl-zoo3, its registration failed: {error!r}", stacklevel=2)


def install() -> None:
    """Put the finder in place, once."""
    if os.environ.get("SB3_BEN_NO_ZOO", "0") in ("", "0") and not any(type(finder) is ZooFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, ZooFinder())


def uninstall() -> None:
    """Take the finder away."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder) is not ZooFinder]
