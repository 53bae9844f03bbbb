"""Which keys of a run were set, by whom, and which differ between runs?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from typing import Any

from finetune.errors import FinetuneError, Problem
from finetune.report.reading import Reading, at
from finetune.secrets import masked

NAMES_OF_RUNS = frozenset({"run_name", "output_dir"})
"""They differ between any two runs, and change nothing of what is trained."""
NOT_SET = "(no such key)"
NOT_READ = "(config.yaml cannot be read)"
OF_THE_MODEL = "model.shape."
"""Sizes: they follow from the model that is named."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a run."""

    key: str
    value: Any
    default: Any
    """Of conf/, with no recipe; `NOT_SET` where it has no such key."""
    by: str
    """`command line`, the recipe, or nothing: nobody wrote down who set it."""

    @property
    def differs(self) -> bool:
        """A row's source has keys that conf/ has not: one that says nothing is no difference."""
        return self.value != self.default and not (self.default == NOT_SET and not self.value)


@dataclass(frozen=True, slots=True)
class Settings:
    """All keys of a run."""

    all: list[Setting]
    note: str
    """What cannot be said of them; empty: nothing."""

    @property
    def differing(self) -> list[Setting]:
        """From conf/, and what somebody set to the very value it has there."""
        return [
            setting
            for setting in self.all
            if (setting.differs or setting.by) and not setting.key.startswith(OF_THE_MODEL)
        ]


def settings_of(reading: Reading) -> Settings:
    """Each key beside the default of conf/, and who set it where the run wrote that down."""
    values = leaves(reading.config)
    if not values:
        return Settings([], "config.yaml could not be read, so no key is known.")
    origin = at(reading.environment, "composed", "provenance")
    origin = origin if isinstance(origin, dict) else {}
    note = "" if origin else "The run did not write down which recipe it was made from."
    try:
        defaults = _defaults()
    except FinetuneError as error:
        note = f"The defaults cannot be composed: {error}"
        defaults = values
    settings = [
        Setting(key, value, defaults.get(key, NOT_SET), _by(key, origin)) for key, value in values.items()
    ]
    return Settings(settings, note)


def differing_keys(readings: list[Reading]) -> dict[str, list[Any]]:
    """Keys that are not the same in all runs, with each run's value; a run whose config cannot be read makes
    no difference, and has `NOT_READ` for each.
    """
    configs = [leaves(reading.config) for reading in readings]
    keys = dict.fromkeys(key for config in configs for key in config if key not in NAMES_OF_RUNS)
    rows = {key: [config.get(key, NOT_SET) if config else NOT_READ for config in configs] for key in keys}
    return {key: row for key, row in rows.items() if _differ([v for v in row if v != NOT_READ])}


def _differ(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys; of a list of sections each item has its number as a name."""
    items: list[tuple[Any, Any]] = list(node.items()) if isinstance(node, dict) else []
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        items = list(enumerate(node))
    if not items:
        return {prefix[:-1]: node} if prefix else {}
    found: dict[str, Any] = {}
    for name, inner in items:
        found |= leaves(inner, f"{prefix}{name}.")
    return found


def _by(key: str, origin: dict[str, Any]) -> str:
    """A key inside a list or a mapping was set with it."""
    while key and key not in origin:
        key = key.rpartition(".")[0]
    return str(origin.get(key, ""))


@cache
def _defaults() -> dict[str, Any]:
    from finetune.config.compose import compose  # Hydra: for this alone

    ignored: list[Problem] = []  # there is no model and there are no rows without a recipe
    return {key: _plain(value) for key, value in leaves(asdict(compose([], problems=ignored).config)).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    value = value.value if isinstance(value, Enum) else value
    return masked(value) if isinstance(value, str) else value
