"""What a model itself allows: the longest row, and the highest token id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.schema import ModelConfig
from finetune.model.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """The model's positions and embedding."""

    positions: int | None
    """Longest row the model was made for; None: not known."""
    embeddings: int | None
    """Rows of the embedding: token ids must lie below; None: not known."""


def model_limits(model: ModelConfig) -> Limits:
    """Read them from `model.shape`, else from config.json, else (positions) from the tokenizer."""
    positions, embeddings = model.shape.max_position_embeddings, model.shape.vocab_size
    if positions is None or embeddings is None:
        config = _config_json(model)
        config = {**config, **(config.get("text_config") or {})}
        positions = positions or config.get("max_position_embeddings") or config.get("n_positions")
        embeddings = embeddings or config.get("vocab_size")
    if positions is None:
        length = load_tokenizer(model).model_max_length
        positions = length if length < 10**9 else None
    return Limits(positions, embeddings)


def _config_json(model: ModelConfig) -> dict[str, Any]:
    folder = Path(model.name_or_path).expanduser()
    if folder.is_dir():
        file: Path | None = folder / "config.json"
    else:
        from transformers.utils.hub import cached_file

        load_tokenizer(model)  # says why when the hub does not give the model
        found = cached_file(
            model.name_or_path,
            "config.json",
            revision=model.revision or "main",
            local_files_only=not hub.reachable(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        file = Path(found) if found else None
    if file is None or not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config
