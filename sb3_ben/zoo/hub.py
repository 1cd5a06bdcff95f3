"""rl-zoo3's way to the Hugging Face Hub, mended where the versions that pip installs beside it do not fit it.

rl-zoo3 2.9 was written for another ``huggingface_sb3``: it imports ``generate_metadata``, which is called ``_generate_metadata``
there, and it expects an error of ``requests`` for a file that is not on the Hub, which ``huggingface_hub`` no longer raises.
Where all fits, nothing changes. And its model cards name the packages that it takes: for algorithms of ours, this one is missing.
"""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ALGORITHMS", "mend_hub"]

#: name in the zoo -> class
ALGORITHMS = {"ben": "BEN", "bootdqn": "BootDQN"}


def mend_hub() -> None:
    """Make ``rl_zoo3.push_to_hub`` and ``rl_zoo3.load_from_hub`` work; doing it again changes nothing."""
    push: Any = import_module("huggingface_sb3.push_to_hub")
    if not hasattr(push, "generate_metadata"):
        push.generate_metadata = lambda *args: push._generate_metadata(*args).to_dict()
    package: Any = import_module("huggingface_sb3")
    if not hasattr(package.load_from_hub, "is_from_sb3_ben"):
        package.load_from_hub = _with_expected_error(package.load_from_hub)
    cards: Any = import_module("huggingface_hub.repocard")
    if not hasattr(cards.metadata_save, "is_from_sb3_ben"):
        cards.metadata_save = _with_our_package(cards.metadata_save)


def _with_expected_error(load_from_hub: Any) -> Any:
    @functools.wraps(load_from_hub)
    def load(repo_id: str, filename: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError
        from requests.exceptions import HTTPError

        try:
            return load_from_hub(repo_id, filename)
        except EntryNotFoundError as error:
            raise HTTPError(str(error)) from error

    load.is_from_sb3_ben = True  # type: ignore[attr-defined]
    return load


def _with_our_package(metadata_save: Any) -> Any:
    """``metadata_save`` is the last that touches a model card before it is uploaded."""

    @functools.wraps(metadata_save)
    def save(local_path: str | Path, data: dict[str, Any]) -> None:
        card = Path(local_path).read_text(encoding="utf-8")
        if any(f"--algo {name} " in card for name in ALGORITHMS):
            Path(local_path).write_text(card.replace("pip install rl_zoo3", 'pip install "sb3_ben[zoo]"'), encoding="utf-8")
        return metadata_save(local_path, data)

    save.is_from_sb3_ben = True  # type: ignore[attr-defined]
    return save
