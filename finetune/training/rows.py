"""Prepared rows as a torch data set and loader, filling rows included."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from finetune.data.cache import row_keys
from finetune.data.documents import flat, list_lengths
from finetune.data.windows import FILL, WindowSampler
from finetune.paths import RunDir
from finetune.training.gauges import OwnTime

IGNORED = -100
"""The label of a token that is not learnt."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The prepared splits of a run."""

    train: Dataset
    eval: Dataset | None


def load_rows(run_dir: RunDir) -> Rows:
    """Open the prepared rows by memory map; the parent may still be preparing them."""
    while not run_dir.data.exists():
        time.sleep(0.05)
    prepared = json.loads(run_dir.data.read_text(encoding="utf-8"))["prepared"]
    held_out = prepared["eval"]
    return Rows(
        train=Dataset.from_file(prepared["train"]),
        eval=Dataset.from_file(held_out) if held_out is not None else None,
    )


def rows_read(run_dir: RunDir) -> list[str | None]:
    """Which prepared rows a run reads."""
    return row_keys(json.loads(run_dir.data.read_text(encoding="utf-8"))["prepared"])


class PreparedRows(TorchDataset[dict[str, Any]]):
    """`input_ids`, `labels` and `seq_lengths` of each prepared row; index `FILL` is a row that teaches
    nothing.
    """

    def __init__(self, prepared: Dataset, filler_token: int) -> None:
        self.prepared = prepared.select_columns(["input_ids", "labels", "seq_lengths"])
        self.filler_token = filler_token

    def __len__(self) -> int:
        return len(self.prepared)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == FILL:
            return {"input_ids": [self.filler_token] * 2, "labels": [IGNORED] * 2, "seq_lengths": [2]}
        return self.prepared[index]


class RowLoader(DataLoader[dict[str, Any]]):
    """A loader that hands the epoch on to its sampler, and counts how long it was waited for; accelerate does
    not touch it.
    """

    def __init__(self, *args: Any, waits: OwnTime | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits = waits

    def __iter__(self) -> Any:
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if self.waits is not None:
                self.waits.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def set_epoch(self, epoch: int) -> None:
        sampler = self.batch_sampler
        assert isinstance(sampler, WindowSampler)
        sampler.set_epoch(epoch)


def row_lengths(prepared: Dataset) -> np.ndarray:
    """Tokens of each row."""
    return list_lengths(prepared, "input_ids")


def document_tokens(prepared: Dataset) -> float:
    """How long the document of a token is, in the mean over all tokens."""
    lengths = flat(prepared, "seq_lengths").astype(np.float64)
    return float((lengths**2).sum() / lengths.sum()) if lengths.sum() else 0.0


def supervised_counts(prepared: Dataset) -> np.ndarray:
    """Learnt tokens of each row; a document's first token has nothing before it and is never learnt."""
    learnt = flat(prepared, "labels") != IGNORED
    documents = flat(prepared, "seq_lengths")
    learnt[np.concatenate([[0], np.cumsum(documents)[:-1]])] = False
    total = np.concatenate([[0], np.cumsum(learnt)])
    ends = np.cumsum(row_lengths(prepared))
    return total[ends] - total[np.concatenate([[0], ends[:-1]])]
