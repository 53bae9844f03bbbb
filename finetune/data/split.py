"""From encoded rows to the finished rows of a split: lengths kept, rows packed, everything counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from finetune.config.schema import DataConfig, TooLong
from finetune.data.gather import SHOWN, Dropped, Rows
from finetune.data.load import SUBJECT
from finetune.data.pack import pack
from finetune.errors import Problem, Refusal, refuse

NOT_LEARNT = -100
TOKENS_PER_BATCH = 4_000_000

LONGER = "longer than data.max_length"
CUT_EMPTY = "no token left to learn after cutting to data.max_length"


@dataclass(frozen=True, slots=True)
class Split:
    """The rows that are trained (or evaluated) on, in groups as they are written: packed, or each alone."""

    name: str
    rows: Rows
    lengths: np.ndarray
    """Of each row of `rows`, after cutting."""
    groups: list[list[int]]
    """The rows of each finished row."""
    read: int
    dropped: list[Dropped]
    truncated: int
    longest: tuple[int, str]
    """Tokens of the longest row before cutting, and where it is."""

    @property
    def used(self) -> list[int]:
        """The rows that are kept, in the order of the source."""
        return sorted(row for group in self.groups for row in group)

    @property
    def packed(self) -> bool:
        return any(len(group) > 1 for group in self.groups)

    def part(self, row: int) -> slice:
        """Where the row lies in `rows.ids` and `rows.learnt`."""
        start = int(self.rows.starts[row])
        return slice(start, start + int(self.lengths[row]))


def divide(rows: Rows, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the indices held out for evaluation, once: (train, eval), disjoint and in order."""
    if fraction > 0 and rows.read < 2:
        why = f"{rows.read} row cannot be divided into training and evaluation"
        raise refuse(f"data.eval_fraction={fraction:g}", why, subject=SUBJECT)
    num_eval = min(max(1, round(rows.read * fraction)), rows.read - 1) if fraction > 0 else 0
    order = np.random.default_rng(seed).permutation(rows.read)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])


def finish(name: str, rows: Rows, indices: np.ndarray, data: DataConfig, max_length: int | None) -> Split:
    """Keep, cut or drop each row by its length, pack, and refuse a split that lost too much."""
    members = (
        np.flatnonzero(np.isin(rows.indices, indices))
        if len(indices) < rows.read
        else np.arange(len(rows.lengths))
    )
    lengths = rows.lengths.copy()
    limit = max_length if max_length is not None else np.iinfo(np.int64).max
    over = members[lengths[members] > limit]
    inside = set(indices.tolist()) if len(indices) < rows.read else None
    dropped = [entry for entry in rows.dropped if inside is None or entry.index in inside]
    if len(over) and data.too_long is TooLong.error:
        raise _too_long(name, rows, over, limit)
    kept = members
    if data.too_long is TooLong.truncate:
        lengths[over] = limit
        learnt_before = np.concatenate(([0], np.cumsum(rows.learnt)))
        left = learnt_before[rows.starts + lengths] - learnt_before[rows.starts]
        without = members[left[members] == 0]
        dropped += [
            Dropped(CUT_EMPTY, int(rows.indices[r]), rows.place(r), int(rows.lengths[r])) for r in without
        ]
        kept = members[left[members] > 0]
    else:
        dropped += [Dropped(LONGER, int(rows.indices[r]), rows.place(r), int(rows.lengths[r])) for r in over]
        kept = members[lengths[members] <= limit]
    dropped.sort(key=lambda entry: entry.index)
    longest = int(members[np.argmax(rows.lengths[members])]) if len(members) else -1
    split = Split(
        name=name,
        rows=rows,
        lengths=lengths,
        groups=_groups(kept, lengths, data, max_length),
        read=len(indices),
        dropped=dropped,
        truncated=len(np.intersect1d(over, kept)),
        longest=(int(rows.lengths[longest]), rows.place(longest)) if longest >= 0 else (0, ""),
    )
    _refuse_losses(split, data, max_length)
    return split


def _groups(
    kept: np.ndarray, lengths: np.ndarray, data: DataConfig, max_length: int | None
) -> list[list[int]]:
    if not data.packing or max_length is None:
        return [[row] for row in kept.tolist()]
    return [kept[group].tolist() for group in map(np.array, pack(lengths[kept], max_length))]


def save(split: Split, folder: Path) -> None:
    """Write the finished rows in the layout of `datasets.Dataset.save_to_disk`."""
    stream = folder.with_name(f"{folder.name}.arrow")
    schema = pyarrow.schema(
        [(name, pyarrow.list_(pyarrow.int32())) for name in ("input_ids", "labels", "seq_lengths")]
        + [("row", pyarrow.list_(pyarrow.int64()))]
    )
    with pyarrow.OSFile(str(stream), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(split, schema):
            writer.write_batch(batch)
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(stream)).save_to_disk(folder)
    finally:
        if not quiet:
            datasets.enable_progress_bars()
    stream.unlink()


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
            pyarrow.ListArray.from_arrays(documents, pyarrow.array(split.rows.indices[rows])),
        ]
        yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)
        batch, tokens = [], 0


def common_rows(train: Split, held_out: Split) -> int:
    """Count held-out rows whose very tokens are also trained on."""
    trained = {train.rows.ids[train.part(row)].tobytes() for row in train.used}
    return sum(held_out.rows.ids[held_out.part(row)].tobytes() in trained for row in held_out.used)


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
    if any(reason in (LONGER, CUT_EMPTY) for reason in reasons):
        longest, place = split.longest
        prompt = _longest_prompt(split)
        why = f"the longest row has {longest} tokens ({place}), the longest prompt {prompt}"
        fix = "Raise data.max_length, or shorten those rows."
        problems.append(Problem(f"data.max_length={max_length}", why, fix))
    if split.groups:
        why = f"{len(split.dropped)} of {split.read} rows ({share:.1%}) would be dropped"
        fix = f"Correct the data, or allow it: data.max_dropped={min(1.0, np.ceil(share * 100) / 100):g}"
        problems.append(Problem(f"data.max_dropped={data.max_dropped:g}", why, fix))
    left = "no row is left to learn from" if not split.groups else "too many rows are dropped"
    raise Refusal(problems, f"{SUBJECT} ({split.name}): {left}")


def _longest_prompt(split: Split) -> int:
    """Tokens before the first learnt one, at most."""
    positions = np.flatnonzero(split.rows.learnt)
    starts = split.rows.starts
    place = np.searchsorted(positions, starts)
    known = place < len(positions)
    return int((positions[place[known]] - starts[known]).max(initial=0))
