"""From encoded rows to the rows of a split: cut or dropped by length, drawn by weight, packed, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow

from finetune.config.schema import DataConfig, SourceConfig, TooLong
from finetune.data.encode import NOT_LEARNT
from finetune.data.gather import SHOWN
from finetune.data.pack import pack
from finetune.data.rows import Dropped, Rows
from finetune.data.source import SUBJECT
from finetune.errors import Problem, Refusal, refuse

TOKENS_PER_BATCH = 4_000_000

LONGER = "longer than data.max_length"
CUT_EMPTY = "no token left to learn after cutting to data.max_length"
NOT_SUPERVISED = "no supervised token (a row's first one has nothing to be predicted from)"


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the mixture takes of one source."""

    source: str
    weight: float
    rows: int
    """Rows of it that are used."""
    usable: int
    """Rows of it that could be."""


@dataclass(frozen=True, slots=True)
class Split:
    """The rows that are trained (or evaluated) on, in groups as they are written: packed, or each alone."""

    name: str
    rows: Rows
    lengths: np.ndarray
    """Of each row of `rows`, after cutting."""
    supervised: np.ndarray
    """Learnt tokens of each row of `rows`, after cutting."""
    groups: list[list[int]]
    """The rows of each finished row."""
    read: int
    dropped: list[Dropped]
    drawn: list[Drawn]
    """Empty: every usable row is used."""
    truncated: int
    longest: np.ndarray
    """The longest rows before cutting, longest first."""

    @property
    def used(self) -> np.ndarray:
        """The rows that are kept, in the order of the source."""
        return np.sort(np.array([row for group in self.groups for row in group], np.int64))

    def part(self, row: int) -> slice:
        """Where the row lies in `rows.ids` and `rows.learnt`."""
        start = int(self.rows.starts[row])
        return slice(start, start + int(self.lengths[row]))


def hold_out(rows: Rows, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the indices held out for evaluation, once: (train, eval), disjoint and in order."""
    if fraction > 0 and rows.read < 2:
        why = f"{rows.read} row cannot be divided into training and evaluation"
        raise refuse(f"data.eval_fraction={fraction:g}", why, subject=SUBJECT)
    num_eval = min(max(1, round(rows.read * fraction)), rows.read - 1) if fraction > 0 else 0
    order = np.random.default_rng(seed).permutation(rows.read)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])


def finish_split(
    name: str,
    rows: Rows,
    indices: np.ndarray,
    data: DataConfig,
    sources: list[SourceConfig],
    max_length: int | None,
    seed: int,
) -> Split:
    """Keep, cut or drop each row by its length, draw, pack, and refuse a split that lost too much.

    `sources`: those whose weights are drawn by; empty for rows to evaluate on, which are all used.
    """
    inside = np.zeros(rows.read, bool)
    inside[indices] = True
    members = np.flatnonzero(inside[rows.table["index"]])
    dropped = [entry for entry in rows.dropped if inside[entry.index]]
    lengths, supervised = rows.lengths.copy(), rows.table["supervised"].copy()
    limit = max_length if max_length is not None else np.iinfo(np.int64).max
    over = members[lengths[members] > limit]
    if len(over) and data.too_long is TooLong.error:
        raise _too_long(name, rows, over, limit)
    if data.too_long is TooLong.truncate:
        lengths[over] = limit
        starts = rows.starts[over].tolist()
        supervised[over] = [int(rows.learnt[start + 1 : start + limit].sum()) for start in starts]
    for row in members[(lengths[members] > limit) | (supervised[members] == 0)]:
        uncut = NOT_SUPERVISED if rows.lengths[row] <= limit else CUT_EMPTY
        reason = LONGER if lengths[row] > limit else uncut
        dropped.append(
            Dropped(reason, int(rows.table["index"][row]), rows.place(row), int(rows.lengths[row]))
        )
    dropped.sort(key=lambda entry: entry.index)
    usable = members[(lengths[members] <= limit) & (supervised[members] > 0)]
    kept, drawn = _draw(usable, rows, sources, seed) if sources else (usable, [])
    split = Split(
        name=name,
        rows=rows,
        lengths=lengths,
        supervised=supervised,
        groups=_groups(kept, lengths, data, max_length),
        read=len(indices),
        dropped=dropped,
        drawn=drawn,
        truncated=len(np.intersect1d(over, kept)),
        longest=members[np.argsort(-rows.lengths[members], kind="stable")[:5]],
    )
    _refuse_losses(split, data, max_length)
    return split


def _draw(
    usable: np.ndarray, rows: Rows, sources: list[SourceConfig], seed: int
) -> tuple[np.ndarray, list[Drawn]]:
    """Draw from each source its part of the mixture: as many rows as there are without a repeat."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return usable, []
    of_source = [usable[rows.sources()[usable] == number] for number in range(len(sources))]
    unit = min(len(own) / weight for own, weight in zip(of_source, weights, strict=True))
    taken = [min(len(own), round(unit * weight)) for own, weight in zip(of_source, weights, strict=True)]
    drawn = [
        Drawn(source.path, weight, count, len(own))
        for source, weight, count, own in zip(sources, weights, taken, of_source, strict=True)
    ]
    short = min(drawn, key=lambda part: part.usable / part.weight)
    for part in drawn:
        if part.rows == 0:
            why = f"its part comes to no row, for {short.source} has {short.usable} usable rows"
            where = f"data source {part.source} of weight {part.weight:g}"
            raise refuse(where, why, "Change the weights, or leave the source out.", subject=SUBJECT)
    chosen = [
        np.random.default_rng((seed, number)).permutation(own)[:count]
        for number, (own, count) in enumerate(zip(of_source, taken, strict=True))
    ]
    return np.sort(np.concatenate(chosen)), drawn


def _groups(
    kept: np.ndarray, lengths: np.ndarray, data: DataConfig, max_length: int | None
) -> list[list[int]]:
    if not data.packing or max_length is None:
        return [[row] for row in kept.tolist()]
    return [kept[group].tolist() for group in map(np.array, pack(lengths[kept], max_length))]


def save(split: Split, file: Path) -> None:
    """Write the finished rows as an Arrow stream, as `datasets.Dataset.from_file` opens it."""
    schema = pyarrow.schema(
        [(name, pyarrow.list_(pyarrow.int32())) for name in ("input_ids", "labels", "seq_lengths")]
        + [("row", pyarrow.list_(pyarrow.int64()))]
    )
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(split, schema):
            writer.write_batch(batch)


def _batches(split: Split, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Gather the ids of each group from where they lie, a few million tokens at a time."""
    starts = split.rows.starts
    batch: list[list[int]] = []
    tokens = 0
    for number, group in enumerate(split.groups, 1):
        batch.append(group)
        tokens += int(split.lengths[group].sum())
        if tokens < TOKENS_PER_BATCH and number < len(split.groups):
            continue
        rows = np.array([row for part in batch for row in part], np.int64)
        documents = np.concatenate(([0], np.cumsum([len(part) for part in batch]))).astype(np.int32)
        lengths = split.lengths[rows]
        ends = np.concatenate(([0], np.cumsum(lengths)))
        flat = np.arange(ends[-1]) + np.repeat(starts[rows] - ends[:-1], lengths)
        ids = split.rows.ids[flat]
        labels = np.where(split.rows.learnt[flat], ids, np.int32(NOT_LEARNT))
        tokens_of_group = ends[documents].astype(np.int32)
        columns = [
            pyarrow.ListArray.from_arrays(tokens_of_group, pyarrow.array(ids)),
            pyarrow.ListArray.from_arrays(tokens_of_group, pyarrow.array(labels)),
            pyarrow.ListArray.from_arrays(documents, pyarrow.array(lengths.astype(np.int32))),
            pyarrow.ListArray.from_arrays(documents, pyarrow.array(split.rows.table["index"][rows])),
        ]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)
        batch, tokens = [], 0


def common_rows(train: Split, held_out: Split) -> int:
    """Count held-out rows whose very tokens are also trained on."""
    trained = train.rows.table["digest"][train.used]
    return int(np.isin(held_out.rows.table["digest"][held_out.used], trained).sum())


def _too_long(name: str, rows: Rows, over: np.ndarray, limit: int) -> Refusal:
    problems = [Problem(rows.place(row), f"{rows.lengths[row]} tokens") for row in over[:SHOWN]]
    if len(over) > SHOWN:
        problems.append(Problem(f"and {len(over) - SHOWN} more", ""))
    return Refusal(
        problems, f"{name}: {len(over)} x longer than data.max_length={limit} (data.too_long=error)"
    )


def _refuse_losses(split: Split, data: DataConfig, max_length: int | None) -> None:
    share = len(split.dropped) / split.read if split.read else 1.0
    if split.groups and share <= data.max_dropped:
        return
    reasons = Counter(entry.reason for entry in split.dropped)
    problems = []
    for reason, count in reasons.items():
        first = [entry for entry in split.dropped if entry.reason == reason][:5]
        rows = ", ".join(f"{e.place} ({e.tokens} tokens)" if e.tokens else e.place for e in first)
        problems.append(Problem(f"{count} x {reason}", f"first {rows}"))
    if any(reason in (LONGER, CUT_EMPTY) for reason in reasons) and len(split.longest):
        row = split.longest[0]
        prompt = split.rows.table["prompt"].max()
        why = f"the longest row has {split.rows.lengths[row]} tokens ({split.rows.place(row)}), "
        fix = "Raise data.max_length, or shorten those rows."
        problems.append(Problem(f"data.max_length={max_length}", f"{why}the longest prompt {prompt}", fix))
    if split.groups:
        why = f"{len(split.dropped)} of {split.read} rows ({share:.1%}) would be dropped"
        fix = f"Correct the data, or allow it: data.max_dropped={min(1.0, np.ceil(share * 100) / 100):g}"
        problems.append(Problem(f"data.max_dropped={data.max_dropped:g}", why, fix))
    left = "no row is left to learn from" if not split.groups else "too many rows are dropped"
    raise Refusal(problems, f"{SUBJECT} ({split.name}): {left}")
