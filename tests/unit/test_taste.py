"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "finetune").rglob("*.py"))
LONGEST_MODULE = 400
TERMINAL = {ROOT / "finetune" / "cli.py", *(ROOT / "finetune" / "commands").glob("*.py")}
ROOMS_FOR_ANYTHING = {"base", "common", "helpers", "manager", "misc", "utils"}
HANDWRITTEN = [
    *MODULES,
    *(ROOT / "tools").rglob("*.py"),
    *(ROOT / "conf").rglob("*.yaml"),
    *(ROOT / "recipes").glob("*.yaml"),
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_a_module_is_short_enough_to_read_in_one_sitting(module: Path) -> None:
    lines = len(module.read_text().splitlines())
    assert lines <= LONGEST_MODULE, (
        f"{name(module)} has {lines} lines: split it where it answers two questions"
    )


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_a_module_says_in_its_first_line_what_it_answers(module: Path) -> None:
    source = module.read_text()
    if module.name == "__init__.py" and not source.strip():
        return
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring, f"{name(module)} has no docstring"
    assert len(docstring.splitlines()[0]) >= 20, f"{name(module)}: the first line says too little"


@pytest.mark.parametrize("module", MODULES, ids=name)
def test_only_the_command_line_prints(module: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    printing = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not printing or module in TERMINAL, f"{name(module)} prints in lines {printing}: log instead"


def test_no_module_is_named_after_everything_and_nothing() -> None:
    vague = [name(module) for module in MODULES if module.stem in ROOMS_FOR_ANYTHING]
    assert vague == []


@pytest.mark.parametrize("path", HANDWRITTEN, ids=name)
def test_code_and_configs_are_ascii_and_finished(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert line.isascii(), f"{name(path)}:{number} is not ASCII: {line!a}"
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", line), (
            f"{name(path)}:{number} is unfinished: {line.strip()}"
        )


def test_the_readme_holds_no_placeholder() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\b[A-Z]+_OUTPUT\b", text)
