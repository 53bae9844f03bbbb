"""Where prepared data is kept, and under which key: the same key always means the same rows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy
import pyarrow
import tokenizers
import transformers

from finetune.config.schema import DataConfig, SourceConfig
from finetune.data.own_format import function_source
from finetune.data.read import identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CODE_VERSION = 2
"""Raised whenever the same input would be prepared differently than before."""

STATISTICS = "statistics.json"


def cache_key(data: DataConfig, tokenizer: PreTrainedTokenizerFast, limits: dict[str, Any], seed: int) -> str:
    """Hash everything that decides what the prepared rows are."""
    sources = {
        name: [
            [_settings(s), identity(s, streaming=data.streaming and name == "train")]
            for s in getattr(data, name)
        ]
        for name in ("train", "eval")
    }
    options = (
        "eval_fraction",
        "max_length",
        "too_long",
        "max_dropped",
        "packing",
        "packing_strategy",
        "loss_on",
        "thinking",
        "split_special_tokens",
    )
    parts = {
        "code": CODE_VERSION,
        "versions": [library.__version__ for library in (transformers, tokenizers, datasets, pyarrow, numpy)],
        "sources": sources,
        "options": {name: getattr(data, name) for name in options},
        "limits": limits,
        "seed": seed if data.eval_fraction or any(s.weight for s in [*data.train, *data.eval]) else None,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def stored(folder: Path) -> dict[str, Any] | None:
    """What was said about the prepared data in this folder; None if there is none."""
    if not (folder / STATISTICS).is_file():
        return None
    answer: dict[str, Any] = json.loads((folder / STATISTICS).read_text(encoding="utf-8"))
    return answer


def store(folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Write beside the folder and rename: nobody ever finds half of it, two runs at once are harmless."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    beside.mkdir(parents=True)
    try:
        said = write(beside)
        (beside / STATISTICS).write_text(json.dumps(said), encoding="utf-8")
        try:
            beside.rename(folder)
        except OSError:
            if stored(folder) is None:  # neither another run's finished work nor a free name
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _settings(source: SourceConfig) -> dict[str, Any]:
    settings = asdict(source)
    if source.format is not None and ":" in source.format:
        settings["function"] = function_source(source.format)
    return settings
