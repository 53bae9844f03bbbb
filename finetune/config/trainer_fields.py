"""Which keys `trainer` has: the fields of the installed `trl.SFTConfig`, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Union

from finetune.config.schema import OwnTrainerFields
from finetune.config.trainer_keys import ALIASES, OWNED_ELSEWHERE
from finetune.errors import UserError

SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/sft_config.py", "SFTConfig"),
)
"""Base class first: a later class overrides a field of an earlier one."""

ENUMS = (("transformers", "training_args.py"), ("transformers", "trainer_utils.py"))

SCALARS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}

CHOSEN_WHEN_UNSET = ("gradient_accumulation_steps", "bf16", "fp16")
"""Fields whose upstream default would hide whether somebody asked for them; null: chosen from other keys."""

AUTO = "auto"
OR_AUTO = ("per_device_train_batch_size", "activation_checkpointing")
"""Fields that also take `auto`: the planner chooses what fits."""


@dataclass(frozen=True, slots=True)
class TrainerField:
    """One field of `SFTConfig`."""

    name: str
    annotation: str
    """The type as upstream writes it."""
    type: Any
    """The nearest type that OmegaConf can hold."""
    default: Any
    """Upstream's; null also for one that upstream computes, or that is chosen here when unset."""
    choices: tuple[str, ...]
    """The only values allowed; empty: any of the type."""


@cache
def sft_fields() -> dict[str, TrainerField]:
    """Every field of the installed `SFTConfig`, those owned by other groups included."""
    enums = dict(_enums())
    found: dict[str, TrainerField] = {}
    for package, file, class_name in SOURCES:
        body = _class(_parse(package, file), class_name)
        found |= {f.name: f for f in _class_fields(body, enums)}
    return found


@cache
def trainer_fields() -> dict[str, TrainerField]:
    """The fields of `SFTConfig` that `trainer` accepts and stores."""
    return {n: f for n, f in sft_fields().items() if n not in OWNED_ELSEWHERE and n not in ALIASES}


@cache
def trainer_class() -> type[OwnTrainerFields]:
    """The dataclass behind `trainer`: our own few fields, then those of `SFTConfig`."""
    columns = [(f.name, f.type, field(default=f.default)) for f in trainer_fields().values()]
    return make_dataclass("TrainerConfig", columns, bases=(OwnTrainerFields,), kw_only=True, slots=True)


def sft_values(trainer: OwnTrainerFields) -> dict[str, Any]:
    """What goes to `SFTConfig`: everything but our own fields and those left unset."""
    values = {name: getattr(trainer, name) for name in trainer_fields()}
    return {n: v for n, v in values.items() if v is not None or trainer_fields()[n].default is not None}


def _parse(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is not installed.\n    Install it: pip install {package}")
    return _module(Path(spec.submodule_search_locations[0]) / file)


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise UserError(f"the installed trl or transformers has no class {name}: its version is not supported")


def _enums() -> Iterator[tuple[str, tuple[str, ...]]]:
    for package, file in ENUMS:
        for node in _parse(package, file).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "ExplicitEnum" for b in node.bases):
                assigned = [s.value for s in node.body if isinstance(s, ast.Assign)]
                yield node.name, tuple(str(v.value) for v in assigned if isinstance(v, ast.Constant))


def _class_fields(body: ast.ClassDef, enums: dict[str, tuple[str, ...]]) -> Iterator[TrainerField]:
    for node in body.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name, call = node.target.id, node.value
        arguments = {k.arg: k.value for k in call.keywords if k.arg} if isinstance(call, ast.Call) else {}
        parts = [ast.unparse(p) for p in _alternatives(node.annotation)]
        default = None if name in CHOSEN_WHEN_UNSET else _literal(arguments.get("default"))
        default = float(default) if parts == ["float"] and default is not None else default
        kind = _omegaconf_type([*parts, *["str"] * (name in OR_AUTO)], optional=default is None)
        choices = next((enums[p] for p in parts if p in enums), _choices(arguments.get("metadata")))
        yield TrainerField(name, ast.unparse(node.annotation), kind, default, choices)


def _literal(node: ast.expr | None) -> Any:
    """A default written as a constant; None for one that upstream computes."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def _alternatives(annotation: ast.expr) -> Iterator[ast.expr]:
    """The members of `A | B | C`."""
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    else:
        yield annotation


def _omegaconf_type(parts: list[str], *, optional: bool) -> Any:
    """The nearest type OmegaConf can hold: it has unions of scalars alone; enums are kept by their value."""
    optional = optional or "None" in parts
    parts = ["bool" if p == "Literal[False]" else p for p in parts if p != "None"]
    if any(p == "dict" or p.startswith("dict[") for p in parts):
        kind: Any = dict[str, Any]
    elif parts == ["list[str]"]:
        kind = list[str]
    elif "list[str]" in parts:
        return Any
    else:
        scalars = [SCALARS[p] for p in parts if p in SCALARS]
        if not scalars:
            return Any
        kind = Union[tuple(scalars)]  # noqa: UP007 (built at run time)
    return Union[kind, None] if optional else kind  # noqa: UP007


def _choices(node: ast.expr | None) -> tuple[str, ...]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(value, ast.List):
                return tuple(ast.literal_eval(value))
    return ()
