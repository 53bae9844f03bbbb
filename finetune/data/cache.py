"""Where prepared data is kept, and under which key: the same key always means the same rows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.config.schema import DataConfig, ModelConfig, SourceConfig
from finetune.data.own_format import function_source
from finetune.data.read import identity
from finetune.data.source import SUBJECT
from finetune.errors import refuse
from finetune.model.limits import Limits
from finetune.model.tokenizer import tokenizer_identity

CODE_VERSION = 3
"""Raised whenever the same input would be prepared differently than before."""

LIBRARIES = ("transformers", "tokenizers", "datasets", "pyarrow", "numpy")
OPTIONS = (
    "eval_fraction",
    "max_length",
    "too_long",
    "max_dropped",
    "packing",
    "packing_strategy",
    "loss_on",
    "thinking",
    "split_special_tokens",
    "streaming",
)

STATISTICS, PARTS = "statistics.json", "key.json"
LOOKED_AT = 50
"""Older entries are not searched for the reason of a miss."""

Parts = dict[str, Any]


def cache_parts(data: DataConfig, model: ModelConfig, limits: Limits, seed: int, rows_needed: int) -> Parts:
    """Everything that decides what the prepared rows are, by the name that people know it by."""
    parts: Parts = {f"the version of {name}": version(name) for name in LIBRARIES}
    for name in ("train", "eval"):
        sources: list[SourceConfig] = getattr(data, name)
        streaming = data.streaming and name == "train"
        parts[f"data.{name}"] = [_settings(source) for source in sources]
        parts[f"the files of data.{name}"] = [identity(source, streaming=streaming) for source in sources]
    parts |= {f"data.{name}": getattr(data, name) for name in OPTIONS}
    drawn = data.eval_fraction > 0 or any(source.weight is not None for source in [*data.train, *data.eval])
    parts |= {
        "finetune itself": CODE_VERSION,
        "the model's limits": asdict(limits),
        "the tokenizer": tokenizer_identity(model),
        "seed": seed if drawn else None,
        "the steps to stream for": rows_needed if data.streaming else None,
    }
    plain: Parts = json.loads(json.dumps(parts, default=str))
    return plain


def cache_folder(root: Path, parts: Parts) -> Path:
    """Where rows of these parts are, or would be."""
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    return root / "data" / key


def row_keys(prepared: dict[str, str | None]) -> list[str | None]:
    """Which rows prepared files hold: the names of their folders, wherever the cache is."""
    return [path and Path(path).parent.name for path in prepared.values()]


def stored(folder: Path) -> dict[str, Any] | None:
    """What was said about the prepared data in this folder; None if there is none, or it is not whole."""
    try:
        answer: dict[str, Any] = json.loads((folder / STATISTICS).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in answer["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return answer if whole else None


def why_missed(folder: Path, parts: Parts) -> str:
    """What is new since the same sources were last prepared."""
    entries = sorted(folder.parent.glob(f"*/{PARTS}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for entry in entries[:LOOKED_AT]:
        old: Parts = json.loads(entry.read_text(encoding="utf-8"))
        if _paths(old) == _paths(parts):
            changed = [name for name in parts if parts[name] != old.get(name)]
            return f"changed since the last time: {', '.join(changed)}"
    return "the first time for these sources"


def store(folder: Path, parts: Parts, write: Callable[[Path], dict[str, Any]]) -> None:
    """Write beside the folder and rename: nobody ever finds half of it, two runs at once are harmless."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        beside.mkdir(parents=True)
        said = write(beside)
        (beside / PARTS).write_text(json.dumps(parts), encoding="utf-8")
        said["sizes"] = {file.name: file.stat().st_size for file in beside.iterdir()}
        (beside / STATISTICS).write_text(json.dumps(said), encoding="utf-8")
        if stored(folder) is None:  # else another run has done the same work meanwhile
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            beside.rename(folder)
    except OSError as error:
        if stored(folder) is None:
            why = f"prepared rows cannot be written: {error.strerror or error}"
            fix = "Make room or give access, or set FINETUNE_CACHE to another folder."
            raise refuse(f"the cache {folder.parent}", why, fix, subject=SUBJECT) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _paths(parts: Parts) -> list[str]:
    return [source["path"] for source in parts["data.train"]]


def _settings(source: SourceConfig) -> dict[str, Any]:
    settings = asdict(source)
    if source.format is not None and ":" in source.format:
        settings["function"] = function_source(source.format)
    return settings
