"""What pyproject.toml declares, what constraints.txt pins and what the code imports are the same things."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
PINS = {
    canonicalize_name(name): pin
    for name, pin in (
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
}


def test_every_declared_dependency_is_pinned_to_a_version_in_its_range() -> None:
    for requirement in (*CORE, *EXTRAS):
        if requirement.name == PROJECT["name"]:
            continue
        pin = PINS.get(canonicalize_name(requirement.name))
        assert pin, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pin), (
            f"constraints.txt has {requirement.name} {pin}, not {requirement}"
        )


def test_everything_that_the_dependencies_pull_in_is_pinned_and_installed_so() -> None:
    for name in pulled_in(PROJECT["name"], {"test", "dev"}) - {PROJECT["name"], "torch"}:
        assert name in PINS, f"{name} comes with the dependencies, but is not in constraints.txt"
        assert version(name) == PINS[name], f"{name} {version(name)} is installed, {PINS[name]} is pinned"


def test_every_library_that_the_code_imports_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in CORE}
    providers = packages_distributions()
    for module in (ROOT / "finetune").rglob("*.py"):
        for top in imported(ast.parse(module.read_text())) - set(sys.stdlib_module_names) - {"finetune"}:
            names = {canonicalize_name(name) for name in providers.get(top, [top])}
            assert names & declared, (
                f"{module.relative_to(ROOT)} imports {top}, which pyproject.toml does not name"
            )


def test_no_file_of_the_set_up_names_a_package_server() -> None:
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "Dockerfile",
        "tools/setup_venv.py",
        ".ci/run",
    ):
        assert not re.search(r"index-url|find-links|https?://", (ROOT / name).read_text()), name


def pulled_in(root: str, extras: set[str]) -> set[str]:
    """Names of all distributions that installing `root[extras]` brings here; torch pins its own itself."""
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, [] if name == "torch" else requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), more) for more in ("", *requirement.extras)]
    return {name for name, _ in seen}


def imported(tree: ast.Module) -> set[str]:
    """Top-level names of absolute imports, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names
