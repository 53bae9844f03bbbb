"""From the words of a command line to one typed config: conf/, then the recipe, then the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from finetune.config.case import COMMAND_LINE
from finetune.config.keys import find_key, instead_of_secret
from finetune.config.model_folder import folder_problem
from finetune.config.overrides import Override, parse_value, split_overrides
from finetune.config.recipes import Recipe, check_choice, config_groups, read_recipes
from finetune.config.saved import config_node, load_config, save_config, schema_node, typed_config
from finetune.config.schema import RunConfig
from finetune.config.values import Checker, WrongValue, written
from finetune.errors import Problem, Refusal, refuse
from finetune.paths import assets
from finetune.secrets import MASK, secret_in

__all__ = ["Composed", "compose", "load_config", "save_config"]

MISSING = {
    "model.name_or_path": ("no model is chosen", "Use recipe=NAME, model=NAME or model.name_or_path=FOLDER."),
    "data.train": ("there are no training rows", "Use recipe=NAME or data.train='[{path: FILE}]'."),
}


@dataclass(frozen=True, slots=True)
class Composed:
    """A config, and where it came from."""

    config: RunConfig
    choices: dict[str, str | None]
    """The name chosen in each group, and `recipe` (several joined with `+`; null: none)."""
    provenance: dict[str, str]
    """Dotted key -> `command line` or the recipe that set it; other keys have the value of `conf/`."""
    notes: list[str]
    """What the person should be told: a value that was dropped, an old name that was used."""

    @property
    def subject(self) -> str:
        """What messages call this config."""
        recipe = self.choices["recipe"]
        return f"recipe '{recipe}'" if recipe else "the config"


def compose(overrides: list[str], *, problems: list[Problem] | None = None) -> Composed:
    """Compose `key=value` words into a config.

    Everything that is wrong is refused in one message. With `problems` it is added there instead, and the
    config holds what was right, so that cross-field problems can be told together with it.
    """
    found: list[Problem] = [] if problems is None else problems
    words = split_overrides(overrides, found)
    groups = config_groups()
    chosen = [w for w in words if (w.key in groups or w.key == "recipe") and not w.raw.startswith("{")]
    recipes = read_recipes(_last(chosen, "recipe") or "null", found)
    if recipes is None:
        raise Refusal(found, "the config")
    named = [(w.key, w.raw) for w in chosen if w.key != "recipe"]
    picked = {group: name for group, name in named if check_choice(group, name, COMMAND_LINE, found)}
    asked = {g: n for r in recipes for g, n in r.choices.items()} | picked
    values, choices = _compose_files(asked, recipes)
    # A group chosen on the command line beats what the recipe sets inside it.
    for group, name in picked.items():
        _merge(values, {group: _group_file(group, name)})
    checker = Checker(COMMAND_LINE, found)
    provenance = {key: f"recipe {r.name}" for r in recipes for key in _leaves(r.values)}
    for path, value in [pair for word in words if word not in chosen for pair in _accepted(word, checker)]:
        if _set(values, path, value):
            provenance[".".join(path)] = COMMAND_LINE
        else:
            found.append(Problem(f"{'.'.join(path)} ({COMMAND_LINE})", "there is no such item in the list"))
    notes = [*(n for r in recipes for n in r.notes), *checker.notes, *_drop_eval(values, provenance, picked)]
    notes += _drop_shape(values, provenance)
    choices["recipe"] = "+".join(r.name for r in recipes) or None
    config = _typed(values, found)
    found += _secrets_of_interpolations(asdict(config))
    _make_paths_absolute(config)
    found += filter(None, [folder_problem(config.model)])
    composed = Composed(config, choices, provenance, notes)
    if found and problems is None:
        raise Refusal(found, composed.subject)
    return composed


def _last(words: list[Override], key: str) -> str | None:
    return next((w.raw for w in reversed(words) if w.key == key), None)


def _compose_files(
    asked: dict[str, str], recipes: list[Recipe]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """conf/ with the groups asked for, and the recipes over it; and the name chosen in each group."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema_node())
    layers = [f"layer{position}" for position in range(len(recipes))]
    for layer, recipe in zip(layers, recipes, strict=True):
        store.store(group="recipe", name=layer, node=recipe.values, package="_global_")
    words = [f"{group}={name}" for group, name in asked.items()]
    words += [f"recipe=[{','.join(layers)}]"] if layers else []
    conf = assets() / "conf"
    try:
        with initialize_config_dir(config_dir=str(conf), version_base="1.3", job_name="finetune"):
            composed = hydra_compose("config", words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise refuse(str(conf), f"cannot be composed: {reason}", subject="the config") from error
    chosen = {group: composed.hydra.runtime.choices.get(group) for group in config_groups()}
    values = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=False, enum_to_str=True))
    del values["hydra"]
    return values, chosen


def _group_file(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(assets() / "conf" / group / f"{name}.yaml"), resolve=False)


def _accepted(word: Override, checker: Checker) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The paths and values that one override sets; a mapping given for a section sets what it names."""
    try:
        accepted = checker.value(word.path, parse_value(word))
    except WrongValue as wrong:
        where = f"{word.key}={written(word.raw)} ({COMMAND_LINE})"
        checker.problems.append(Problem(where, f"expected {wrong}", wrong.fix))
        return
    if accepted is not None:
        path, value = accepted
        key = find_key(path)
        if key is not None and is_dataclass(key.type) and isinstance(value, dict):
            yield from ((tuple(k.split(".")), v) for k, v in _leaves(value, f"{'.'.join(path)}.").items())
        else:
            yield accepted


def _leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.items():
        is_section = isinstance(value, dict) and value
        found |= _leaves(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found


def _merge(values: dict[str, Any], over: dict[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    """Put a value in its place; False when the path leads to an item that a list does not have."""
    node: Any = values
    for part, following in pairwise(path):
        if isinstance(node, list):
            if int(part) >= len(node):
                return False
            node = node[int(part)]
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if isinstance(node, list) and int(following) >= len(node):
            return False
    if isinstance(node, list):
        node[int(path[-1])] = value
    else:
        node[path[-1]] = value
    return True


def _drop_eval(values: dict[str, Any], provenance: dict[str, str], picked: dict[str, str]) -> list[str]:
    """Held-out rows of a recipe do not belong to other training rows."""
    given = {key for key, origin in provenance.items() if origin == COMMAND_LINE}
    replaced = "data.train" in given or "data" in picked
    own_eval = any(k.startswith("data.eval.") or k == "data.eval" for k in given)
    if "data" in picked and "eval" in _group_file("data", picked["data"]):
        own_eval = True
    if not replaced or own_eval or not values["data"]["eval"]:
        return []
    values["data"]["eval"] = []
    key = "data.train" if "data.train" in given else "data"
    return [f"{key} set on the command line: the recipe's data.eval is dropped"]


def _drop_shape(values: dict[str, Any], provenance: dict[str, str]) -> list[str]:
    """Sizes of one model do not belong to another one that is named over it; a recipe that names both is
    taken at its word.
    """
    given = {key for key, origin in provenance.items() if origin == COMMAND_LINE}
    shape = values["model"]["shape"]
    others = [key for key, size in _leaves(shape).items() if size and f"model.shape.{key}" not in given]
    if "model.name_or_path" not in given or not others:
        return []
    for key in others:
        *parents, name = key.split(".")
        del reduce(dict.__getitem__, parents, shape)[name]
    return ["model.name_or_path is set: the sizes of the model it replaces are dropped"]


def _typed(values: dict[str, Any], found: list[Problem]) -> RunConfig:
    """The typed config; what is missing or cannot be resolved becomes a problem, all of it at once."""
    wrong = " ".join(p.where for p in found)
    while True:
        try:
            node = config_node(values)
            missing = sorted(OmegaConf.missing_keys(node))
            for key in missing:
                _set(values, _path(key), "")
                if key not in wrong:
                    found.append(
                        Problem(f"{key} is missing", *MISSING.get(key, ("every source needs a path", "")))
                    )
            config = typed_config(config_node(values) if missing else node)
            break
        except OmegaConfBaseException as error:
            found.append(_unresolved(error))
            if not error.full_key or not _unset(values, _path(error.full_key)):
                raise Refusal(found, "the config") from error
    if not config.data.train and "data.train" not in wrong:
        found.append(Problem("data.train is missing", *MISSING["data.train"]))
    return config


def _secrets_of_interpolations(node: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """`${oc.env:NAME}` brings the value of NAME into the config; what was typed has been checked before."""
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for name, value in items:
            yield from _secrets_of_interpolations(value, (*path, str(name)))
    elif why := secret_in(node):
        key = ".".join(path)
        yield Problem(
            f"{key}={MASK}", f"{why}, which would be written into the run's folder", instead_of_secret(key)
        )


def _path(key: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\[(\d+)\]", r".\1", key).split("."))


def _unset(values: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Take out one value; False when it is not there."""
    node: Any = values
    for part in path[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.get(part)
        if not isinstance(node, dict | list):
            return False
    return isinstance(node, dict) and node.pop(path[-1], None) is not None


def _unresolved(error: OmegaConfBaseException) -> Problem:
    reason = " ".join(str(error.msg or error).split())
    fix = r"Write \${ where the characters ${ are meant as they stand."
    return Problem(error.full_key or "a value", reason, fix)


def _make_paths_absolute(config: RunConfig) -> None:
    """A relative path means the directory the person started in, whatever the directory of the processes."""
    config.model.name_or_path = _absolute(config.model.name_or_path)
    config.model.chat_template = config.model.chat_template and _absolute(config.model.chat_template)
    config.adapter.init_from = config.adapter.init_from and _absolute(config.adapter.init_from)
    for source in (*config.data.train, *config.data.eval):
        source.path = _absolute(source.path)


def _absolute(text: str) -> str:
    """Local paths in full; hub ids, and template text, as they are."""
    expanded = os.path.expanduser(text)
    is_local = expanded.startswith(("./", "../", "/")) or (expanded and os.path.exists(expanded))
    return os.path.abspath(expanded) if is_local else text
