"""What is said about prepared data: the numbers of `prepare --json`, and the lines of the terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.config.schema import DataConfig, LossOn, TooLong
from finetune.data.split import LONGER, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLES = 3
WORTH_A_WARNING = 0.05


def numbers(
    split: Split, tokenizer: PreTrainedTokenizerFast, max_length: int | None, packing: bool
) -> dict[str, Any]:
    """Count rows, tokens and losses of a split."""
    used = split.used
    lengths = split.lengths[used]
    tokens = int(lengths.sum())
    supervised = sum(int(split.rows.learnt[split.part(row)].sum()) for row in used)
    reasons = Counter(entry.reason for entry in split.dropped)
    formats = sorted({layout.format.value for _, layout in split.rows.layouts})
    return {
        "rows_read": split.read,
        "rows_used": len(used),
        "dropped": dict(reasons),
        "first_dropped": {
            reason: [entry.place for entry in split.dropped if entry.reason == reason][:5]
            for reason in reasons
        },
        "truncated": split.truncated,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "max_length": max_length,
        "longest_row": {"tokens": split.longest[0], "place": split.longest[1]},
        "packed_rows": len(split.groups) if packing else None,
        "packing_efficiency": tokens / (len(split.groups) * max_length) if packing and max_length else None,
        "format": formats[0] if len(formats) == 1 else formats,
        "files": [file for file, _ in split.rows.layouts],
        "max_token_id": max((int(split.rows.ids[split.part(row)].max()) for row in used), default=0),
        "cache": "miss",
        "samples": [_sample(split, row, tokenizer) for row in used[:SAMPLES]],
    }


def loss_line(data: DataConfig, split: Split, end: str) -> str:
    """Say in words which tokens are learnt."""
    form = split.rows.layouts[0][1].form
    if data.loss_on is LossOn.all:
        what = "every token, those of the questions too (data.loss_on=all)"
    elif form == "text":
        what = "every token (plain text has no roles)"
    elif form == "prompt with completion":
        what = "the completions and the end token after each"
    elif data.loss_on is LossOn.last_assistant:
        what = f"the last answer of each conversation and its end token {end}"
    elif data.loss_on is LossOn.completion:
        what = f"the completions and the end token {end} after each"
    else:
        what = f"the answers and the end token {end} after each"
    return f"loss on {what}"


def lines(name: str, split: Split, said: dict[str, Any], data: DataConfig) -> list[str]:
    """Tell what happened to the rows of a split."""
    layouts: dict[str, list[str]] = {}
    for file, layout in split.rows.layouts:
        layouts.setdefault(str(layout), []).append(file)
    result = []
    for how, files in layouts.items():
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        result.append(f"{name}: {where}: {how}")
    result.append(
        f"{name}: {said['rows_used']:,} of {split.read:,} rows used, {said['tokens']:,} tokens, "
        f"{said['supervised_tokens']:,} learnt ({said['supervised_tokens'] / max(1, said['tokens']):.1%})"
    )
    result += _losses(name, split, said, data)
    if split.rows.shared_tokens:
        result.append(
            f"{name}: {split.rows.shared_tokens} answers begin within a token that also holds the blank or "
            "newline before them (the tokenizer joins the two); it is learnt if it holds a word of the answer"
        )
    if said["packed_rows"] is not None:
        result.append(
            f"{name}: packed into {said['packed_rows']:,} rows of at most {said['max_length']} tokens, "
            f"{said['packing_efficiency']:.1%} filled"
        )
    return result


def _losses(name: str, split: Split, said: dict[str, Any], data: DataConfig) -> list[str]:
    limit = "no limit known" if said["max_length"] is None else f"limit {said['max_length']}"
    tokens, place = split.longest
    result = [f"{name}: longest row {tokens} tokens ({place}), {limit}"]
    if split.truncated or data.too_long is TooLong.truncate:
        result.append(f"{name}: {_rows(split.truncated)} cut to data.max_length={said['max_length']}")
    share = len(split.dropped) / max(1, split.read)
    warning = "WARNING: " if share > WORTH_A_WARNING else ""
    for reason, count in said["dropped"].items():
        why = f"{LONGER}={said['max_length']}" if reason == LONGER else reason
        first = ", ".join(said["first_dropped"][reason])
        result.append(f"{name}: {warning}dropped {count} of {split.read} rows: {why} (first: {first})")
    return result


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _sample(split: Split, row: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids, learnt = split.rows.ids[split.part(row)], split.rows.learnt[split.part(row)]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], learnt.astype(np.int8), [0]))))
    pieces = [ids[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    return {"text": tokenizer.decode(ids), "supervised_text": [tokenizer.decode(piece) for piece in pieces]}
