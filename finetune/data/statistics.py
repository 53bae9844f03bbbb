"""What is said about prepared data: the numbers of `prepare --json`, and the lines of the terminal."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.config.schema import DataConfig, LossOn, Thinking, TooLong
from finetune.data.split import LONGER, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLES = 5
WORTH_A_WARNING = 0.05


def count_split(
    split: Split, tokenizer: PreTrainedTokenizerFast, max_length: int | None, packing: bool
) -> dict[str, Any]:
    """Count rows, tokens and losses of a split."""
    rows, used = split.rows, split.used
    tokens = int(split.lengths[used].sum())
    reasons = Counter(entry.reason for entry in split.dropped)
    formats = sorted({place.layout.format.value for place in rows.places})
    return {
        "rows_read": split.read,
        "rows_used": len(used),
        "dropped": dict(reasons),
        "first_dropped": {
            reason: [entry.place for entry in split.dropped if entry.reason == reason][:5]
            for reason in reasons
        },
        "not_drawn": sum(part.usable - part.rows for part in split.drawn),
        "duplicates": len(used) - len(np.unique(rows.table["digest"][used])),
        "truncated": split.truncated,
        "tokens": tokens,
        "supervised_tokens": int(split.supervised[used].sum()),
        "max_length": max_length,
        "lengths": histogram(split.lengths[used]),
        "longest_rows": [
            {"tokens": int(rows.lengths[row]), "place": rows.place(row)} for row in split.longest
        ],
        "packed_rows": len(split.groups) if packing else None,
        "packing_efficiency": tokens / (len(split.groups) * max_length) if packing and max_length else None,
        "format": formats[0] if len(formats) == 1 else formats,
        "files": list(dict.fromkeys(place.file for place in rows.places)),
        "cache": "miss",
        "samples": [sample(split, row, tokenizer) for row in used[:SAMPLES]],
    }


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Rows by length, in steps of a power of two that make at most 12 bars: `{"from", "below", "rows"}`."""
    width = 1
    while int(lengths.max(initial=0)) >= 12 * width:
        width *= 2
    counts = np.bincount(lengths // width)
    return [
        {"from": place * width, "below": (place + 1) * width, "rows": int(count)}
        for place, count in enumerate(counts)
    ]


def sample(split: Split, row: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A row in words: the whole text, and its pieces in order, each with the mark whether it is learnt."""
    ids, learnt = split.rows.ids[split.part(row)], split.rows.learnt[split.part(row)]
    edges = [0, *(np.flatnonzero(np.diff(learnt.astype(np.int8))) + 1).tolist(), len(ids)]
    pieces = [
        {"text": tokenizer.decode(ids[start:stop]), "supervised": bool(learnt[start])}
        for start, stop in pairwise(edges)
    ]
    return {
        "place": split.rows.place(row),
        "text": tokenizer.decode(ids),
        "supervised_text": [piece["text"] for piece in pieces if piece["supervised"]],
        "pieces": pieces,
    }


def loss_line(data: DataConfig, split: Split, end: str) -> str:
    """Say in words which tokens are learnt."""
    form = split.rows.places[0].layout.form
    if form == "tokenized":
        what = "the tokens that `labels` names (every token where a row has none)"
    elif data.loss_on is LossOn.all:
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
    if form == "conversation" and data.thinking is not Thinking.keep:
        how = {Thinking.off: "thoughts are taken out", Thinking.mixed: "rows without a thought say so"}
        what += f"; {how[data.thinking]} (data.thinking={data.thinking.value})"
    return f"loss on {what}"


def lines(split: Split, said: dict[str, Any], data: DataConfig) -> list[str]:
    """Tell what happened to the rows of a split."""
    name = split.name
    layouts: dict[str, list[str]] = {}
    for place in split.rows.places:
        layouts.setdefault(str(place.layout), []).append(place.file)
    result = []
    for how, files in layouts.items():
        where = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        result.append(f"{name}: {where}: {how}")
    result.append(
        f"{name}: {said['rows_used']:,} of {split.read:,} rows used, {said['tokens']:,} tokens, "
        f"{said['supervised_tokens']:,} learnt ({said['supervised_tokens'] / max(1, said['tokens']):.1%})"
    )
    total = sum(part.weight for part in split.drawn)
    for part in split.drawn:
        share = f"weight {part.weight:g} of {total:g} ({part.weight / total:.1%})"
        result.append(f"{name}: {part.source}: {part.rows:,} of {part.usable:,} rows drawn, {share}")
    result += _losses(name, said, data)
    if said["duplicates"]:
        result.append(f"{name}: {_rows(said['duplicates'])} repeat another one exactly")
    if said["packed_rows"] is not None:
        result.append(
            f"{name}: packed into {said['packed_rows']:,} rows of at most {said['max_length']} tokens, "
            f"{said['packing_efficiency']:.1%} filled"
        )
    return result


def count_lines(split: Split) -> list[str]:
    """What is worth telling of all rows that were read for a split, and for one held out of it."""
    counted = [f"{count:,} {what}" for what, count in split.rows.counts.items() if count]
    return [*split.rows.notes, *counted]


def _losses(name: str, said: dict[str, Any], data: DataConfig) -> list[str]:
    limit = "no limit known" if said["max_length"] is None else f"limit {said['max_length']}"
    longest = said["longest_rows"][0]
    result = [f"{name}: longest row {longest['tokens']} tokens ({longest['place']}), {limit}"]
    if said["truncated"] or data.too_long is TooLong.truncate:
        result.append(f"{name}: {_rows(said['truncated'])} cut to data.max_length={said['max_length']}")
    for reason, count in said["dropped"].items():
        warning = "WARNING: " if count > WORTH_A_WARNING * said["rows_read"] else ""
        why = f"{LONGER}={said['max_length']}" if reason == LONGER else reason
        first = ", ".join(said["first_dropped"][reason])
        dropped = f"dropped {count} of {said['rows_read']} rows"
        result.append(f"{name}: {warning}{dropped}: {why} (first: {first})")
    return result


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
