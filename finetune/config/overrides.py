"""What `key=value` on a command line means: group choices, and values that arrive as they were typed."""

from __future__ import annotations

import re
from dataclasses import dataclass, is_dataclass
from typing import Any, cast, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from finetune.config.keys import find_key, strip_optional
from finetune.config.schema import SourceConfig
from finetune.config.values import WrongValue
from finetune.errors import Problem
from finetune.secrets import masked

SCALAR = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?|true|false|null", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of the command line."""

    key: str
    raw: str
    """The value as typed."""

    @property
    def path(self) -> tuple[str, ...]:
        """`data.train[0].limit` and `data.train.0.limit` are the same place."""
        return tuple(re.sub(r"\[(\d+)\]", r".\1", self.key).split("."))


COUNTED = re.compile(r"(\d+)x_(\w+)")
"""`4x_a100_80gb`: four such cards."""


def split_overrides(texts: list[str], problems: list[Problem]) -> list[Override]:
    """The overrides of a command line; `+key=` and `++key=` mean `key=`, `hardware=4x_NAME` four cards."""
    found = []
    for text in texts:
        key, equals, raw = text.partition("=")
        key = key.strip().lstrip("+")
        if key.startswith("~"):
            fix = f"Write {key[1:]}=null to unset a value." if key[1:] else ""
            problems.append(Problem(f"{masked(text)} (command line)", "keys cannot be deleted", fix))
        elif not equals or not key:
            problems.append(Problem(f"{masked(text)} (command line)", "expected key=value"))
        elif key == "hardware" and (counted := COUNTED.fullmatch(raw)):
            found += [Override("hardware.num_gpus", counted[1]), Override(key, counted[2])]
        else:
            found.append(Override(key, raw))
    return found


def parse_value(override: Override) -> Any:
    """The value for its key: text as typed, `[...]` and `{...}` read where the key can hold them.

    Raises `WrongValue` for brackets that cannot be read.
    """
    key = find_key(override.path)
    kind = strip_optional(key.type) if key is not None else Any
    raw = override.raw
    if raw == "null":
        return None
    structured = kind is Any or get_origin(kind) in (list, dict) or is_dataclass(kind)
    if not structured:
        return raw
    if raw[:1] in ("[", "{"):
        return _parse_container(raw)
    if get_origin(kind) is list and get_args(kind)[0] is SourceConfig:
        return raw
    if kind is Any and SCALAR.fullmatch(raw):
        return _read_yaml(raw)
    if kind is Any and key is not None and re.fullmatch(r"[\w-]+(,[\w-]+)+", raw):
        raise WrongValue("one value or a list", f"Write [{raw}].")
    return raw


def _parse_container(raw: str) -> Any:
    """Hydra's grammar first (interpolations, `{a:1}`), then YAML (`=`, brackets, any letter)."""
    try:
        parsed = OverridesParser.create().parse_override(f"value={raw}")
        if not parsed.is_sweep_override():
            return parsed.value()
    except HydraException:
        pass
    try:
        return _read_yaml(raw)
    except (YAMLError, OmegaConfBaseException) as error:
        fix = 'Put text with special characters in quotes: {path: "a, b.jsonl"}.'
        raise WrongValue(f"a list or mapping: {masked(' '.join(str(error).split()))}", fix) from error


def _read_yaml(text: str) -> Any:
    """YAML as OmegaConf reads it: 1e-4 is a number."""
    node = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False))
    return node["value"]
