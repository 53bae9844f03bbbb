"""How long the whole run takes, and what it costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from finetune.config.schema import RunConfig
from finetune.hardware.machine import Machine
from finetune.planner.option import Option

BYTES_PER_TOKEN = 4.0
"""Of English text in a file, with common tokenizers; the row's own punctuation included."""
SETUP_SECONDS = 300.0
"""A rented machine: image, packages, the first step's kernels."""
DOWNLOAD_BYTES_S = 200e6
"""What a rented machine reaches from the hub."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds and money, as far as they can be known; evaluations and saves aside."""

    steps: int | None
    seconds: float | None
    """Set-up and download included."""
    cost: float | None
    assumption: str


@dataclass(frozen=True, slots=True)
class Rows:
    """What local files hold."""

    count: int
    tokens: float


def duration_of(option: Option, config: RunConfig, machine: Machine) -> Duration:
    """From `trainer.max_steps` or the rows of local files; rows are as long as those, else as they may be."""
    trainer, batch = config.trainer, option.facts.batch
    longest = option.tokens_per_step / batch.global_size
    rows, filled = _rows(config), 1.0
    assumption = "every row as long as it may be"
    if rows is not None and not config.data.packing:
        filled = min(rows.tokens / max(rows.count, 1) / longest, 1.0)
        assumption = f"rows of {filled * longest:,.0f} tokens, by the size of the files"
    if trainer.max_steps and trainer.max_steps > 0:
        steps = trainer.max_steps
    elif rows is None:
        why = "the number of rows is not known before the data is read: `finetune prepare` counts them"
        return Duration(None, None, None, why)
    else:
        count = max(-(-rows.tokens // longest), 1) if config.data.packing else rows.count
        count *= 1 - config.data.eval_fraction
        steps = max(ceil(trainer.num_train_epochs * ceil(count / batch.global_size)), 1)
    seconds = SETUP_SECONDS + option.outside.download / DOWNLOAD_BYTES_S + steps * option.time.total * filled
    cost = None
    if machine.price_per_hour is not None:
        billed = max(seconds / 60, machine.minimum_minutes)
        cost = billed / 60 * machine.price_per_hour * machine.num_machines
    return Duration(steps, seconds, cost, assumption)


def _rows(config: RunConfig) -> Rows | None:
    """Rows and tokens of all sources; None where one is not a file with a row on each line."""
    found = [_rows_of(source.path, source.limit) for source in config.data.train]
    known = [rows for rows in found if rows is not None]
    if not known or len(known) < len(found):
        return None
    return Rows(sum(rows.count for rows in known), sum(rows.tokens for rows in known))


def _rows_of(path: str, limit: int | None) -> Rows | None:
    file = Path(os.path.expanduser(path))
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    state = file.stat()
    count = _lines(file, state.st_mtime_ns, state.st_size)
    taken = count if limit is None else min(count, limit)
    return Rows(taken, state.st_size / BYTES_PER_TOKEN * taken / max(count, 1))


@cache
def _lines(file: Path, changed_ns: int, size: int) -> int:
    """Lines that hold something, counted once for all strategies; a file that has changed is another one."""
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())
