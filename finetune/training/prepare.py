"""Prepares a run's rows before any process needs them, and makes sure that at least one step can be made of
them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from finetune.data.prepare import cache_root, prepare_data
from finetune.errors import UserError, refuse
from finetune.paths import RunDir
from finetune.training.start import CheckedRun

Say = Callable[[str], None]


@contextmanager
def freed_when_refused(run: CheckedRun, run_dir: RunDir) -> Iterator[None]:
    """Remove the folder of a run that is refused before anything ran: its name is free for the next try.

    The folder that several machines share is machine 0's to remove.
    """
    try:
        yield
    except UserError:
        if run.config.launch.machine_rank == 0:
            shutil.rmtree(run_dir.path)
        raise


def prepare_rows(run: CheckedRun, run_dir: RunDir, say: Say) -> None:
    """Tokenise and mask the data, or find it in the cache, and write `data.json`."""
    launch = run.config.launch
    if launch.machine_rank > 0:
        return  # machine 0 prepares, on the storage that all share
    cache = cache_root() if launch.num_machines == 1 else run_dir.path / "data"
    prepared = prepare_data(run.config.data, run.config.model, run.config.seed, cache)
    for line in prepared.lines:
        say(line)
    _at_least_one_step(run, _rows(prepared.statistics["train"]), say)
    paths = {"train": str(prepared.train), "eval": str(prepared.eval) if prepared.eval else None}
    beside = run_dir.data.with_suffix(".part")
    beside.write_text(
        json.dumps({"prepared": paths, **prepared.statistics}, indent=2) + "\n", encoding="utf-8"
    )
    os.replace(beside, run_dir.data)


def _at_least_one_step(run: CheckedRun, rows: int, say: Say) -> None:
    """A run that cannot make one optimizer step is refused before anything is loaded."""
    trainer, batch = run.config.trainer, run.facts.batch
    per_epoch = -(-rows // batch.global_size)
    limited = trainer.max_steps is not None and trainer.max_steps > 0
    steps = trainer.max_steps if limited else math.ceil(trainer.num_train_epochs * per_epoch)
    if steps < 1:
        raise refuse(
            f"trainer.num_train_epochs={trainer.num_train_epochs}",
            f"{rows} rows in batches of {batch.global_size} are {per_epoch} steps an epoch: not one is made.",
            "Use more epochs, or trainer.max_steps.",
            subject=run.composed.subject,
        )
    filled = per_epoch * batch.global_size - rows
    filling = f", the last one filled up with {filled} empty rows" if filled else ""
    say(f"steps     {per_epoch:,} an epoch ({rows:,} rows{filling}), {steps:,} in all")


def _rows(train: dict[str, Any]) -> int:
    """Rows that the sampler deals out: packed ones count once."""
    rows: int = train["packed_rows"] or train["rows_used"]
    return rows
