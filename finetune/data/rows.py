"""All rows of one list of sources: their token ids in files, for they may be more than memory holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.encode import ROW, Encoded
from finetune.data.format import Layout


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is read and not trained on."""

    reason: str
    index: int
    place: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A file of a source, and what a row's number counts in it."""

    file: str
    unit: str
    source: int
    """Which of the sources it belongs to."""
    layout: Layout


@dataclass(frozen=True, slots=True)
class Rows:
    """The encoded rows; ids and learnt marks lie one row behind the other."""

    ids: np.ndarray
    learnt: np.ndarray
    table: np.ndarray
    """What is known of each row (`ROW`)."""
    starts: np.ndarray
    """Where each row begins in `ids`."""
    files: np.ndarray
    """Which of `places` each row came from."""
    places: list[Place]
    read: int
    dropped: list[Dropped]
    counts: Counter[str]
    notes: list[str]
    """What is to be told of the sources."""
    max_token_id: int

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.table["length"]
        return lengths

    def place(self, row: int) -> str:
        """Where a row came from, for people."""
        place = self.places[self.files[row]]
        return f"{place.file} {place.unit} {self.table['number'][row]}"

    def sources(self) -> np.ndarray:
        """Which source each row came from."""
        return np.array([place.source for place in self.places], np.int64)[self.files]


@dataclass(slots=True)
class RowWriter:
    """Takes encoded rows in their order, and gives all of them back by memory map."""

    folder: Path
    name: str
    table: list[np.ndarray] = field(default_factory=list)
    files: list[np.ndarray] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    read: int = 0
    max_token_id: int = 0

    def add(self, place: Place, encoded: Encoded) -> None:
        if not self.places or self.places[-1] != place:
            self.places.append(place)
        self.table.append(encoded.rows)
        self.files.append(np.full(len(encoded.rows), len(self.places) - 1, np.int32))
        self.counts += encoded.counts
        if not len(encoded.ids):
            return
        self.max_token_id = max(self.max_token_id, int(encoded.ids.max()))
        for kind, array in (("ids", encoded.ids), ("learnt", encoded.learnt)):
            with (self.folder / f"{self.name}.{kind}").open("ab") as stream:
                array.tofile(stream)

    def finish(self) -> Rows:
        """The rows written so far; the files are gone from the folder once nothing maps them."""
        table = np.concatenate(self.table) if self.table else np.empty(0, ROW)
        lengths = table["length"]
        return Rows(
            ids=self._mapped("ids", np.int32),
            learnt=self._mapped("learnt", bool),
            table=table,
            starts=np.cumsum(lengths) - lengths,
            files=np.concatenate(self.files) if self.files else np.empty(0, np.int32),
            places=self.places,
            read=self.read,
            dropped=self.dropped,
            counts=self.counts,
            notes=self.notes,
            max_token_id=self.max_token_id,
        )

    def _mapped(self, kind: str, dtype: type) -> np.ndarray:
        file = self.folder / f"{self.name}.{kind}"
        if not file.exists():
            return np.empty(0, dtype)
        array = np.memmap(file, dtype, "r")
        file.unlink()  # the map keeps what it needs
        return array
