"""Which recipe is meant by `recipe=...`, and what stands in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from finetune.config.suggest import nearest
from finetune.config.values import Checker
from finetune.errors import Problem
from finetune.paths import assets
from finetune.secrets import masked


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file, checked: the groups it chooses and the values it sets."""

    name: str
    file: Path
    choices: dict[str, str]
    values: dict[str, Any]
    notes: list[str]


def read_recipes(text: str, problems: list[Problem]) -> list[Recipe] | None:
    """The recipes of `NAME`, `PATH.yaml` or `[a,b]`, in order; None when one of them cannot be read at all.

    What is wrong in them is added to `problems`.
    """
    stacked = text[1:-1].split(",") if text.startswith("[") and text.endswith("]") else [text]
    names = [n.strip().strip("'\"") for n in stacked]
    recipes = [_read(name, problems) for name in names if name not in ("", "null")]
    readable = [r for r in recipes if r is not None]
    return readable if len(readable) == len(recipes) else None


def recipe_files() -> dict[str, Path]:
    """Every recipe by name: those shipped, then those of `recipes/` in the working directory."""
    folders = (assets() / "recipes", Path.cwd() / "recipes")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def config_groups() -> dict[str, list[str]]:
    """The groups of `conf/` with the names one can choose in each."""
    folders = (f for f in sorted((assets() / "conf").iterdir()) if f.is_dir())
    return {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in folders}


def check_choice(group: str, name: str, origin: str, problems: list[Problem]) -> bool:
    """Whether `name` is a file of the group; if not, that is a problem."""
    names = config_groups()[group]
    if name in names:
        return True
    close = nearest(name, names)
    fix = f"Did you mean {group}={close}? " if close else ""
    if group == "model":
        fix += f"A folder or hub id is given as model.name_or_path={name}. "
    problems.append(
        Problem(f"{group}={name} ({origin})", "no such choice", f"{fix}Known: {', '.join(names)}.")
    )
    return False


def _read(text: str, problems: list[Problem]) -> Recipe | None:
    file = _find(text, problems)
    if file is None:
        return None
    # A run folder's config.yaml is known by its run, not as `config`.
    name = file.parent.name if file.name == "config.yaml" else file.stem
    where = f"recipe {text}" if text == name else f"recipe {file}"
    try:
        node = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = masked(" ".join(str(error).split()))
        problems.append(Problem(f"recipe={text}", f"{file} is not readable as YAML: {reason}"))
        return None
    if not isinstance(node, dict):
        problems.append(Problem(f"recipe={text}", f"{file} is not a mapping of keys to values"))
        return None
    choices = _choices(node.pop("defaults", None) or [], where, problems)
    checker = Checker(where, problems)
    return Recipe(name, file, choices, checker.tree(node), checker.notes)


def _find(text: str, problems: list[Problem]) -> Path | None:
    if text.endswith((".yaml", ".yml")) or "/" in text:
        file = Path(text).expanduser().absolute()
        file = file / "config.yaml" if file.is_dir() else file
        if file.is_file():
            return file
        problems.append(Problem(f"recipe={text}", f"there is no file {file}"))
        return None
    known = recipe_files()
    if text in known:
        return known[text]
    close = nearest(text, known)
    fix = f"Did you mean recipe={close}? " if close else ""
    problems.append(Problem(f"recipe={text}", "no such recipe", f"{fix}Known: {', '.join(sorted(known))}."))
    return None


def _choices(defaults: Any, where: str, problems: list[Problem]) -> dict[str, str]:
    """The groups chosen by a recipe's `defaults` list, whose entries read `override /model: NAME`."""
    found: dict[str, str] = {}
    groups = config_groups()
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        items = entry.items() if isinstance(entry, dict) else [(entry, None)]
        for key, name in items:
            group = re.sub(r"^(override\s+)?/?", "", str(key))
            if key == "_self_" or (name is None and group in groups):
                continue
            if group not in groups:
                fix = f"Write `override /GROUP: NAME` with one of {', '.join(groups)}."
                problems.append(Problem(f"defaults: {entry} ({where})", "no such group", fix))
            elif check_choice(group, str(name), where, problems):
                found[group] = str(name)
    return found
