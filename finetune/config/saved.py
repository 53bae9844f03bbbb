"""How a config is written to a run's folder and read back, exactly."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from finetune.config.keys import run_config_class
from finetune.config.schema import RunConfig
from finetune.config.values import Checker, escaped
from finetune.errors import Refusal, refuse
from finetune.paths import embedded, write_whole

HEADER = "# Everything this run was given, resolved. Repeat it: python -m finetune recipe=THIS_FILE\n"


def save_config(config: RunConfig, path: Path) -> None:
    """Write every key; the file can be loaded, and used as `recipe=PATH`."""
    body = OmegaConf.to_yaml(OmegaConf.create(_plain(dataclasses.asdict(config))))
    write_whole(path, HEADER + body)


def load_config(path: Path) -> RunConfig:
    """Read what `save_config` wrote."""
    try:
        node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise refuse(str(path), f"cannot be read: {error}", subject="a saved config") from error
    checker = Checker(str(path))
    values = checker.tree(cast("dict[Any, Any]", node))
    if checker.problems:
        raise Refusal(checker.problems, f"the saved config {path}")
    return typed_config(config_node(values))


def config_node(values: dict[str, Any]) -> DictConfig:
    """Plain values over the schema: an OmegaConf node that knows what is missing and how to interpolate."""
    if not OmegaConf.has_resolver("embedded"):
        OmegaConf.register_new_resolver("embedded", lambda name="": str(embedded(name)))
    return cast(DictConfig, OmegaConf.merge(schema_node(), values))


def typed_config(node: DictConfig) -> RunConfig:
    """The node as the typed config: interpolations resolved, no OmegaConf object left."""
    return cast(RunConfig, OmegaConf.to_object(node))


@cache
def schema_node() -> DictConfig:
    """The schema with its defaults; merging copies it."""
    return cast(DictConfig, OmegaConf.structured(run_config_class()))


def _plain(value: Any) -> Any:
    """Enums as their values, and text that happens to hold `${` protected."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return escaped(value) if isinstance(value, str) else value
