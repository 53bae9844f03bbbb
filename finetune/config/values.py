"""Does a value have the type of its key? One converter for command line, recipes and saved files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from finetune.config.keys import Key, explain_unknown, find_key, instead_of_secret, strip_optional, why_secret
from finetune.config.schema import SourceConfig
from finetune.config.suggest import nearest
from finetune.config.trainer_fields import AUTO
from finetune.config.trainer_keys import ALIASES
from finetune.errors import Problem
from finetune.secrets import MASK, masked

TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class WrongValue(Exception):
    """A value that is not of its key's type; the text says what was expected."""

    def __init__(self, expected: str, fix: str = "") -> None:
        super().__init__(expected)
        self.fix = fix


@dataclass(slots=True)
class Checker:
    """Goes through one source of values (a recipe, the command line) and keeps what is right in it."""

    origin: str
    """Where the values were set, for messages: `command line`, `recipes/x.yaml`."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _switches: dict[tuple[str, ...], tuple[str, Any]] = field(default_factory=dict)
    """Keys that have an old name: the name that was written, and its value."""

    def tree(self, node: dict[Any, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
        """The part of a nested mapping that the schema accepts, converted; the rest becomes problems."""
        kept: dict[str, Any] = {}
        for name, value in node.items():
            accepted = self.value((*path, str(name)), value)
            if accepted is not None:
                kept[accepted[0][-1]] = accepted[1]
        return kept

    def value(self, path: tuple[str, ...], value: Any) -> tuple[tuple[str, ...], Any] | None:
        """The path (under today's name) and the converted value, or None when they are a problem."""
        today = _todays_name(path)
        converted = self._at(today, value)
        if converted is _REFUSED:
            return None
        if today[:1] == ("trainer",) and today[1:2] and today[1] in ALIASES.values():
            self._note_old_name(path, today, converted)
        return today, converted

    def _note_old_name(self, path: tuple[str, ...], today: tuple[str, ...], value: Any) -> None:
        name, dotted = ".".join(path), ".".join(today)
        earlier, other = self._switches.setdefault(today, (name, value))
        if other != value:
            why = f"{earlier}={written(other)} says otherwise"
            self._refuse(name, value, why, f"Set {dotted} alone: the other is its old name.")
        if path != today:
            self.notes.append(f"{name} is the old name of {dotted} ({self.origin})")

    def _at(self, path: tuple[str, ...], value: Any) -> Any:
        dotted = ".".join(path)
        why = why_secret(path, value)
        if why:
            self._refuse(dotted, MASK, why, instead_of_secret(dotted))
            return _REFUSED
        key = find_key(path)
        if key is None:
            self._refuse(dotted, value, *explain_unknown(dotted))
            return _REFUSED
        kind = strip_optional(key.type)
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            return self.tree(value, path)
        if get_origin(kind) is list and get_args(kind)[0] is SourceConfig:
            return self._sources(path, value)
        if isinstance(value, dict) and value and (kind is Any or get_origin(kind) is dict):
            return self.tree(value, path)
        try:
            return convert(key, value)
        except WrongValue as wrong:
            self._refuse(dotted, value, f"expected {wrong}", wrong.fix)
            return _REFUSED

    def _sources(self, path: tuple[str, ...], value: Any) -> Any:
        """A list of sources; one path, or one source, stands for a list of one."""
        items = value if isinstance(value, list) else [value]
        kept = []
        for position, item in enumerate(items):
            node = {"path": item} if isinstance(item, str) else item
            if not isinstance(node, dict):
                self._refuse(
                    ".".join(path),
                    value,
                    "expected a list of sources",
                    f"Write {'.'.join(path)}='[{{path: FILE}}]'.",
                )
                return _REFUSED
            kept.append(self.tree(node, (*path, str(position))))
        return kept

    def _refuse(self, dotted: str, value: Any, why: str, fix: str = "") -> None:
        inside = value if isinstance(value, list) else [value]
        shown = "" if any(isinstance(one, dict) for one in inside) else f"={written(value)}"
        self.problems.append(Problem(f"{dotted}{shown} ({self.origin})", why, fix))


def _todays_name(path: tuple[str, ...]) -> tuple[str, ...]:
    if path[:1] == ("trainer",) and path[1:2] and path[1] in ALIASES:
        return ("trainer", ALIASES[path[1]], *path[2:])
    return path


class _Refused:
    """Marks a value that was not accepted; None is a value."""


_REFUSED = _Refused()


def convert(key: Key, value: Any) -> Any:
    """`value` as the type of its key, or `WrongValue`. Interpolations are left for later."""
    if isinstance(value, str) and "${" in value:
        return value
    if key.or_auto:
        return value if value == AUTO else _number_or_truth(key.type, value)
    converted = _convert(key.type, value)
    if key.choices and converted is not None and converted not in key.choices:
        close = nearest(str(value), key.choices)
        few = (
            key.choices if len(key.choices) <= 12 else (*key.choices[:8], f"... ({len(key.choices)} in all)")
        )
        raise WrongValue(f"one of {', '.join(few)}", f"Did you mean {close}?" if close else "")
    return converted


def _number_or_truth(kind: Any, value: Any) -> Any:
    """A value of a key whose only text is `auto`."""
    bare = next(member for member in get_args(kind) if member is not str)
    try:
        return _convert(bare, value)
    except WrongValue as wrong:
        raise WrongValue(f"{wrong}, or {AUTO}", wrong.fix) from None


def written(value: Any) -> str:
    """A value as a person writes it in an override; long ones are cut."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    text = masked(f"[{', '.join(map(written, value))}]" if isinstance(value, list) else str(value))
    return text if len(text) <= 120 else f"{text[:117]}..."


def _convert(kind: Any, value: Any) -> Any:
    if kind is Any or (value is None and type(None) in get_args(kind)):
        return value
    bare = strip_optional(kind)
    if get_origin(bare) in (Union, UnionType):
        return _one_of(bare, value)
    if get_origin(bare) is list and isinstance(value, list):
        return [_convert(get_args(bare)[0], v) for v in value]
    if get_origin(bare) is dict and isinstance(value, dict):
        return {str(k): _convert(get_args(bare)[1], v) for k, v in value.items()}
    if isinstance(bare, type) and issubclass(bare, Enum) and isinstance(value, str):
        names = [m.value for m in bare]
        if value in names:
            return value
        close = nearest(value, names)
        raise WrongValue(_expected(kind), f"Did you mean {close}?" if close else "")
    readers = {bool: _truth, int: _whole, float: _number, str: _text}
    if bare in readers:
        found = readers[bare](value)
        if found is not None:
            return found
    raise WrongValue(_expected(kind), _how_to_write(bare, value))


def _one_of(kind: Any, value: Any) -> Any:
    """A member of a union of scalars: text that reads as a number or a truth value is one where allowed."""
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        kind = Union[tuple(a for a in get_args(kind) if a is not bool)]  # noqa: UP007 (`no` and `on` are words here)
    for member, read in ((bool, _truth), (int, _whole), (float, _number), (str, _text)):
        if member in (kind, *get_args(kind)):
            found = read(value)
            if found is not None:
                return found
    raise WrongValue(_expected(kind))


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return TRUTH.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == number // 1 else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _text(value: Any) -> str | None:
    """Text; a whole number stands for its digits, but YAML has already changed `1.50` or `yes`."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _expected(kind: Any) -> str:
    if type(None) in get_args(kind):
        rest = [a for a in get_args(kind) if a is not type(None)]
        return f"{' or '.join(map(_expected, rest))}, or null"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_expected, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(m.value for m in kind)}"
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "a mapping"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _how_to_write(kind: Any, value: Any) -> str:
    if get_origin(kind) is list and isinstance(value, str):
        return f"Write a list: [{value}]"
    if get_origin(kind) is dict or is_dataclass(kind):
        return "Write a mapping: {name: value, ...}"
    if isinstance(value, str) and "," in value:
        return "Give one value; several in turn (--multirun) are not built yet."
    if kind is str:
        return 'YAML reads this as something else than text: put it in quotes, "...".'
    return ""


def escaped(text: str) -> str:
    """Text in which `${` is no interpolation."""
    return re.sub(r"(\\*)\$\{", lambda m: m.group(1) * 2 + r"\${", text)
