"""Prepares a run's rows before any process needs them, and makes sure that at least one step can be made of
them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from finetune.config.batch import Batch
from finetune.data.cache import row_keys
from finetune.data.prepare import PreparedData, cache_root, prepare_data
from finetune.errors import UserError, refuse
from finetune.paths import RunDir, write_whole
from finetune.training.checkpoint import read_manifest
from finetune.training.resume import Resume
from finetune.training.start import CheckedRun

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Steps:
    """The optimizer steps that the rows come to."""

    per_epoch: int
    total: int
    rows: int
    """Rows that the sampler deals out: packed ones count once."""
    filled: int
    """Empty rows that fill up an epoch's last batch."""

    @property
    def line(self) -> str:
        """As it is printed."""
        filling = f", the last one filled up with {self.filled} empty rows" if self.filled else ""
        return f"steps     {self.per_epoch:,} an epoch ({self.rows:,} rows{filling}), {self.total:,} in all"


@contextmanager
def freed_when_refused(run: CheckedRun, run_dir: RunDir, resume: Resume | None) -> Iterator[None]:
    """Remove the folder of a run that is refused before anything ran: its name is free for the next try.

    Never that of a resumed run; the folder that several machines share is machine 0's to remove.
    """
    try:
        yield
    except UserError:
        if run.config.launch.machine_rank == 0 and resume is None:
            shutil.rmtree(run_dir.path)
        raise


def prepare_rows(run: CheckedRun, run_dir: RunDir, say: Say) -> None:
    """Tokenise and mask the data, or find it in the cache, and write `data.json`."""
    launch = run.config.launch
    if launch.machine_rank > 0:
        return  # machine 0 prepares, on the storage that all share
    prepared = _prepared(run, run_dir)
    for line in prepared.lines:
        say(line)
    say(count_steps(run.config.trainer, run.facts.batch, prepared, run.composed.subject).line)
    content = {"prepared": _paths(prepared), **prepared.statistics}
    write_whole(run_dir.data, json.dumps(content, indent=2) + "\n")


def refuse_other_rows(run: CheckedRun, resume: Resume) -> None:
    """A resumed run reads the very rows that it was begun with: told before its folder is touched."""
    if resume.found is None:
        return
    before = read_manifest(resume.found.path).get("rows")
    if before == row_keys(_paths(_prepared(run, resume.run_dir))):
        return
    if any(change.startswith("data") for change in resume.differences.allowed):
        return
    raise refuse(
        f"the data of {resume.run_dir.path.name}",
        "its rows are not those that the run was begun with: a file, the tokenizer or a library has changed",
        "Restore them, start a new run, or go on with others: checkpoint.allow_changes='[data]'.",
        subject="what is to be resumed",
    )


def _prepared(run: CheckedRun, run_dir: RunDir) -> PreparedData:
    config = run.config
    cache = cache_root() if config.launch.num_machines == 1 else run_dir.path / "data"
    needed = rows_needed(config.trainer, run.facts.batch)
    new_tokens = config.adapter.trains_embeddings
    return prepare_data(config.data, config.model, config.seed, cache, needed, new_tokens=new_tokens)


def _paths(prepared: PreparedData) -> dict[str, str | None]:
    return {"train": str(prepared.train), "eval": str(prepared.eval) if prepared.eval else None}


def rows_needed(trainer: Any, batch: Batch) -> int:
    """How many rows a stream must give: those of `max_steps` steps (0: it is not set)."""
    return max(trainer.max_steps, 0) * batch.global_size


def count_steps(trainer: Any, batch: Batch, prepared: PreparedData, subject: str) -> Steps:
    """The optimizer steps that follow; a run that cannot make one is refused before anything is loaded."""
    train = prepared.statistics["train"]
    rows: int = train["packed_rows"] or train["rows_used"]  # packed ones count once
    per_epoch = -(-rows // batch.global_size)
    total = trainer.max_steps if trainer.max_steps > 0 else math.ceil(trainer.num_train_epochs * per_epoch)
    if total < 1:
        raise refuse(
            f"trainer.num_train_epochs={trainer.num_train_epochs}",
            f"{rows} rows in batches of {batch.global_size} are {per_epoch} steps an epoch: not one is made.",
            "Use more epochs, or trainer.max_steps.",
            subject=subject,
        )
    return Steps(per_epoch, total, rows, filled=per_epoch * batch.global_size - rows)
