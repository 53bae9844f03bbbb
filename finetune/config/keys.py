"""Which keys a config has, and what is said about a key that it has not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from finetune.config.schema import OwnTrainerFields, RunConfig
from finetune.config.suggest import nearest_key
from finetune.config.trainer_fields import OR_AUTO, trainer_class, trainer_fields
from finetune.config.trainer_keys import OWNED_ELSEWHERE
from finetune.secrets import TELLING, secret_in

REFUSED = {
    "model.device_map": (
        "it splits one model over the devices inside each process, and training needs each process "
        "on a device of its own",
        "Use distributed=fsdp or distributed=zero3 for a model that does not fit on one device.",
    ),
    "model.load_in_4bit": ("weights are quantised by the adapter's method", "Use adapter=qlora."),
    "model.load_in_8bit": ("weights are quantised by the adapter", "Use adapter=qlora, adapter.bits=8."),
}
"""Keys people know from elsewhere: why not, and what to use."""

NAMES_ELSEWHERE = {
    "lr": "trainer.learning_rate",
    "epochs": "trainer.num_train_epochs",
    "batch_size": "trainer.global_batch_size",
    "optimizer": "trainer.optim",
    "lora_r": "adapter.r",
    "rank": "adapter.r",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_name_or_path": "model.name_or_path",
    "model_path": "model.name_or_path",
    "torch_dtype": "model.dtype",
    "num_gpus": "launch.num_processes",
    "nproc_per_node": "launch.num_processes",
}
"""What other tools call a key of ours."""

SECRET_KEY = re.compile(r"(^|_)(access|auth|hub|api|hf)_(token|key)$|^token$|password$|secret(_key)?$")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the schema."""

    type: Any
    choices: tuple[str, ...] = ()
    or_auto: bool = False
    """Whether the only text it takes is `auto`."""


@cache
def run_config_class() -> type[RunConfig]:
    """`RunConfig` with the fields of the installed `SFTConfig` under `trainer`."""
    trainer = trainer_class()
    column = ("trainer", trainer, field(default_factory=trainer))
    return make_dataclass("TypedRunConfig", [column], bases=(RunConfig,), kw_only=True, slots=True)


@cache
def members(cls: type) -> dict[str, Key]:
    """The keys directly under a dataclass of the schema."""
    hints = get_type_hints(cls)
    choices = {n: f.choices for n, f in trainer_fields().items()} if issubclass(cls, OwnTrainerFields) else {}
    return {f.name: Key(hints[f.name], choices.get(f.name, ()), f.name in OR_AUTO) for f in fields(cls)}


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key; members of a list's items are written without the index."""
    return tuple(_dotted(run_config_class(), ""))


def find_key(path: tuple[str, ...]) -> Key | None:
    """The key at a path such as `("data", "train", "0", "limit")`; None when the schema has none there."""
    key = Key(run_config_class())
    for part in path:
        kind = strip_optional(key.type)
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(kind) and isinstance(kind, type):
            found = members(kind).get(part)
            if found is None:
                return None
            key = found
        elif origin is list and part.isdigit():
            key = Key(arguments[0])
        elif origin is dict:
            key = Key(arguments[1])
        elif kind is Any:
            key = Key(Any)
        else:
            return None
    return key


def explain_unknown(key: str) -> tuple[str, str]:
    """Why `key` is not accepted, and what to use instead."""
    if key in REFUSED:
        return REFUSED[key]
    group, _, name = key.partition(".")
    if group == "trainer" and name.partition(".")[0] in OWNED_ELSEWHERE:
        return "not set under trainer", OWNED_ELSEWHERE[name.partition(".")[0]]
    name = key.rpartition(".")[2]
    close = NAMES_ELSEWHERE.get(name) or nearest_key(re.sub(r"\.\d+\b", "", key), known_keys())
    return "no such key", f"Did you mean {close}?" if close else "`finetune --help` lists the groups of keys."


def why_secret(path: tuple[str, ...], value: object) -> str:
    """Why a key or its value may not be written into a run's folder; empty when it may."""
    name = path[-1]
    unknown = isinstance(value, str) and find_key(path) is None and name not in OWNED_ELSEWHERE
    if SECRET_KEY.search(name) or (unknown and TELLING.search(name.upper())):
        return "a token would be written into the run's folder, so it is not accepted here"
    holds = secret_in(value)
    return f"{holds}, which would be written into the run's folder" if holds else ""


def instead_of_secret(key: str) -> str:
    """Where a secret belongs."""
    if key.startswith("hooks."):
        return "Write $NAME in single quotes: the hook's own shell takes it from the environment."
    return "Tokens come from the environment (HF_TOKEN, AWS_SECRET_ACCESS_KEY, ...) or `hf auth login`."


def strip_optional(kind: Any) -> Any:
    """`X` for `X | None`; other unions stay."""
    arguments = get_args(kind)
    if type(None) in arguments:
        rest = [a for a in arguments if a is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind


def _dotted(cls: type, prefix: str) -> Iterator[str]:
    for name, key in members(cls).items():
        kind = strip_optional(key.type)
        yield prefix + name
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _dotted(kind, f"{prefix}{name}.")
