"""Which documents do prepared rows hold, and what does each of them ask? No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.encode import NOT_LEARNT

if TYPE_CHECKING:
    from datasets import Dataset

LEAST_NEW_TOKENS = 32
"""Of an answer."""


class Documents:
    """The rows one by one, packed ones taken apart; of each no more than its place is held in memory."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows
        self.lengths = flat(rows, "seq_lengths").astype(np.int64)
        counts = list_lengths(rows, "seq_lengths")
        self._row = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(self.lengths)
        row_starts = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)[:-1]])]
        self._start = ends - self.lengths - row_starts[self._row]

    @classmethod
    def in_file(cls, file: Path) -> Documents:
        from datasets import Dataset

        return cls(Dataset.from_file(str(file)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[list[int], list[int]]:
        """Token ids and labels."""
        row = self.rows[int(self._row[number])]
        start = int(self._start[number])
        part = slice(start, start + int(self.lengths[number]))
        return row["input_ids"][part], row["labels"][part]

    def stretches(self, number: int) -> list[range]:
        """The rows in so many stretches of like length; of fewer rows one for each."""
        count, number = len(self), min(number, len(self))
        return [range(place * count // number, (place + 1) * count // number) for place in range(number)]


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks and answers, in tokens."""

    prompt: list[int]
    reference: list[int]
    """The last answer of the row, with its end token."""


def question_of(ids: list[int], labels: list[int]) -> Question | None:
    """The last learnt stretch of a row, and all that stands before it; None where nothing does."""
    end = next((at for at in range(len(ids), 0, -1) if labels[at - 1] != NOT_LEARNT), 0)
    start = next((at for at in range(end, 0, -1) if labels[at - 1] == NOT_LEARNT), 0)
    return Question(ids[:start], ids[start:end]) if 0 < start < end else None


def room_for(questions: Iterable[Question]) -> int:
    """Tokens that an answer may have: twice the longest reference, and never fewer than for a sentence."""
    return max(LEAST_NEW_TOKENS, 2 * max((len(one.reference) for one in questions), default=0))


def flat(rows: Dataset, column: str) -> np.ndarray:
    """All values of a list column, one row after the other."""
    return np.concatenate([np.asarray(chunk.flatten()) for chunk in rows.data.column(column).chunks])


def list_lengths(rows: Dataset, column: str) -> np.ndarray:
    """How many values each row has in a list column."""
    return np.concatenate([np.asarray(chunk.value_lengths()) for chunk in rows.data.column(column).chunks])
