"""From the configured sources to data that can be trained on: once, before any model is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.config.schema import DataConfig, Format, ModelConfig, TooLong
from finetune.data import statistics
from finetune.data.cache import cache_folder, cache_parts, store, stored, why_missed
from finetune.data.gather import Quota, gather
from finetune.data.rows import Rows, RowWriter
from finetune.data.source import SUBJECT
from finetune.data.split import common_rows, finish_split, hold_out, save
from finetune.errors import Refusal, refuse
from finetune.model.limits import Limits, model_limits
from finetune.model.tokenizer import load_tokenizer, turn_end
from finetune.report.data_page import data_page

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAGE = "data.html"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The files of the prepared rows (`datasets.Dataset.from_file`), and what is to be said about them."""

    train: Path
    eval: Path | None
    statistics: dict[str, Any]
    """`{"train": {...}, "eval": {...} or None}`, as `prepare --json` prints it."""
    lines: list[str]
    page: Path
    """The same as HTML, with samples."""


def cache_root() -> Path:
    """The folder of everything that can be made again: `FINETUNE_CACHE`, or `~/.cache/finetune`."""
    return Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune").expanduser()


def prepare_data(
    data: DataConfig,
    model: ModelConfig,
    seed: int,
    cache_dir: Path,
    rows_needed: int = 0,
    *,
    new_tokens: bool = False,
) -> PreparedData:
    """Load, check, convert, tokenise, mask and pack the data, or find it in the cache. Imports no torch.

    `rows_needed`: finished rows after which a stream (`data.streaming`) is read no further. `new_tokens`: the
    run gives tokens beyond the model's embedding rows of their own, and trains them.
    """
    if not data.train:
        raise refuse(
            "data.train=[]", "there is nothing to train on", "data.train='[{path: FILE}]'", subject=SUBJECT
        )
    limits = model_limits(model)
    max_length = data.max_length if data.max_length is not None else limits.positions
    if data.packing and max_length is None:
        why = "packing needs a length, and the model's positions are not known"
        raise refuse("data.max_length=null", why, "Set data.max_length.", subject=SUBJECT)
    parts = cache_parts(data, model, limits, seed, rows_needed)
    folder = cache_folder(cache_dir, parts)
    said = stored(folder)
    how = "found in the cache"
    if said is None:
        how = f"written to the cache ({why_missed(folder, parts)})"
        tokenizer = load_tokenizer(model)
        work = _Work(data, tokenizer, limits, max_length, seed, rows_needed)
        store(folder, parts, lambda place: _prepare(work, place))
        said = stored(folder)
        assert said is not None
    if limits.embeddings is not None and said["highest"] >= limits.embeddings and not new_tokens:
        raise _outside(said["highest"], limits.embeddings, load_tokenizer(model))
    for split in ("train", "eval"):
        if said["statistics"][split] is not None:
            said["statistics"][split]["cache"] = "miss" if how.startswith("written") else "hit"
    return PreparedData(
        train=folder / "train.arrow",
        eval=folder / "eval.arrow" if said["statistics"]["eval"] is not None else None,
        statistics=said["statistics"],
        page=folder / PAGE,
        lines=[*said["lines"], f"prepared data {how}: {folder}"],
    )


@dataclass(frozen=True, slots=True)
class _Work:
    data: DataConfig
    tokenizer: PreTrainedTokenizerFast
    limits: Limits
    max_length: int | None
    seed: int
    rows_needed: int


def _prepare(work: _Work, place: Path) -> dict[str, Any]:
    data, tokenizer, max_length, seed = work.data, work.tokenizer, work.max_length, work.seed
    quotas = stream_quotas(data, work.rows_needed, max_length) if data.streaming else None
    rows = gather(data.train, data, tokenizer, RowWriter(place, "train"), quotas)
    train_indices, eval_indices = hold_out(rows, data.eval_fraction, seed)
    train = finish_split("train", rows, train_indices, data, data.train, max_length, seed)
    held_out = None
    if data.eval:
        own = gather(data.eval, data, tokenizer, RowWriter(place, "eval"))
        held_out = finish_split("eval", own, np.arange(own.read), data, [], max_length, seed)
    elif len(eval_indices):
        held_out = finish_split("eval", rows, eval_indices, data, [], max_length, seed)
    splits = {"train": train, "eval": held_out}
    said: dict[str, dict[str, Any] | None] = {"train": None, "eval": None}
    end = tokenizer.convert_ids_to_tokens(turn_end(tokenizer))
    lines = [statistics.loss_line(data, train, end)]
    if data.streaming:
        lines.append(
            f"the stream was read as far as the steps need: {rows.read:,} rows; the rest is not looked at"
        )
    highest = tokenizer.pad_token_id or 0
    for name, split in splits.items():
        if split is None:
            continue
        counted = said[name] = statistics.count_split(split, tokenizer, max_length, data.packing)
        _refuse_ids_outside(split.rows, work.limits, tokenizer)
        highest = max(highest, split.rows.max_token_id)
        lines += statistics.lines(split, counted, data)
        if split.rows is not rows or split is train:
            lines += statistics.count_lines(split)
        if split is held_out:
            copies = counted["rows_also_in_train"] = common_rows(train, held_out)
            lines += [f"eval: {copies} rows are exact copies of training rows"] if copies else []
        save(split, place / f"{name}.arrow")
    (place / PAGE).write_text(data_page(said, lines), encoding="utf-8")
    return {"statistics": said, "lines": lines, "highest": highest}


def stream_quotas(data: DataConfig, rows_needed: int, max_length: int | None) -> list[Quota]:
    """How much of each source a stream reads: enough rows (packed: tokens) for the steps, by weight."""
    rows = rows_needed / (1 - data.eval_fraction)
    weights = [source.weight or 1.0 for source in data.train]
    return [
        Quota(
            rows=ceil(rows * weight / sum(weights)),
            tokens=ceil(rows * weight / sum(weights)) * (max_length or 0) if data.packing else 0,
            max_length=max_length,
            cut=data.too_long is TooLong.truncate,
        )
        for weight in weights
    ]


def _refuse_ids_outside(rows: Rows, limits: Limits, tokenizer: PreTrainedTokenizerFast) -> None:
    """Ids that come with the data must lie below the model's rows, or be tokens that are new to it."""
    if rows.places[0].layout.format is not Format.tokenized or limits.embeddings is None:
        return
    allowed = max(limits.embeddings, len(tokenizer))
    if rows.max_token_id >= allowed:
        outside = int(np.argmax(rows.ids >= allowed))
        where = rows.place(int(np.searchsorted(rows.starts, outside, "right")) - 1)
        why = f"input_ids holds {rows.ids[outside]}, and the model's embedding has {limits.embeddings} rows"
        raise refuse(where, why, "Tokenise with the tokenizer of this model.", subject=SUBJECT)


def _outside(highest: int, embeddings: int, tokenizer: PreTrainedTokenizerFast) -> Refusal:
    return refuse(
        f"tokenizer {tokenizer.name_or_path}",
        f"token id {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}) lies outside the model's "
        f"embedding of {embeddings} rows",
        "Use the tokenizer that belongs to the model. Tokens that you have added need rows that are trained: "
        "adapter=full, or adapter.modules_to_save='[embed_tokens, lm_head]'.",
        subject="tokenizer and model",
    )
