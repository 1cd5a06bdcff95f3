"""The floor plan: who may import whom, and rooms small enough to be seen at a glance."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sb3_ben import BEN
from sb3_ben.ben.policies import BENPolicy

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "sb3_ben").rglob("*.py"))
OPTIONS = r"(bellman|msbbe|elbo|exploration|belief_scope|aleatoric_flow|rnn_type|kind)"


def lint_imports(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", *arguments, "--no-cache"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_imports_follow_the_plan() -> None:
    result = lint_imports("--config", "setup.cfg")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_the_plan_notices_a_door_in_the_wrong_wall(tmp_path: Path) -> None:
    """The same contracts on a copy of the package whose flows look at SB3 and at the algorithm."""
    for file in FILES:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())
    units = tmp_path / "sb3_ben" / "flows" / "units.py"
    units.write_text(units.read_text() + "\nimport stable_baselines3\nfrom sb3_ben.ben import paper\n")
    result = lint_imports("--config", "setup.cfg", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "0 kept, 4 broken" in result.stdout


def definitions(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield f"{file.relative_to(ROOT)}:{node.name}", node  # type: ignore[attr-defined]


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def test_no_file_is_longer_than_450_lines() -> None:
    assert not [str(file) for file in FILES if len(file.read_text().splitlines()) > 450]


def test_no_class_has_more_than_30_methods() -> None:
    sizes = {name: sum(isinstance(part, ast.FunctionDef) for part in node.body) for name, node in definitions(ast.ClassDef)}  # type: ignore[attr-defined]
    assert not {name: size for name, size in sizes.items() if size > 30}


def test_functions_are_short() -> None:
    sizes = {name: body_lines(node) for name, node in definitions(ast.FunctionDef)}  # type: ignore[arg-type]
    assert not {name: size for name, size in sizes.items() if size > 40}
    assert sorted(sizes.values())[int(0.9 * len(sizes))] <= 13


def test_the_algorithm_is_seen_on_few_pages() -> None:
    assert len(inspect.getsource(BEN).splitlines()) <= 400
    assert len(inspect.signature(BEN).parameters) <= 36
    assert len(inspect.signature(BENPolicy).parameters) <= 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_options_are_resolved_once(file: Path) -> None:
    """Names of options are looked up in tables, where users give them, and compared nowhere else."""
    assert not re.findall(rf"{OPTIONS} *(==|!=|in) .*", file.read_text())
