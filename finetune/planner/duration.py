"""How long the whole run takes, and what it costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from finetune.config.schema import RunConfig
from finetune.hardware.machine import Machine
from finetune.planner.plan import Option

BYTES_PER_TOKEN = 4.0
"""Of English text in a file, with common tokenizers; the row's own punctuation included."""
SETUP_SECONDS = 300.0
"""A rented machine: image, packages, the first step's kernels."""
DOWNLOAD_BYTES_S = 200e6
"""What a rented machine reaches from the hub."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds and money, as far as they can be known."""

    steps: int | None
    seconds: float | None
    """Set-up and download included."""
    cost: float | None
    assumption: str


def duration_of(option: Option, config: RunConfig, machine: Machine) -> Duration:
    """From `trainer.max_steps`, else from the size of local files."""
    steps, assumption = _steps(option, config)
    if steps is None:
        return Duration(None, None, None, assumption)
    seconds = SETUP_SECONDS + option.outside.download / DOWNLOAD_BYTES_S + steps * option.time.total
    cost = None
    if machine.price_per_hour is not None:
        billed = max(seconds / 60, machine.minimum_minutes)
        cost = billed / 60 * machine.price_per_hour * machine.num_machines
    return Duration(steps, seconds, cost, assumption)


def _steps(option: Option, config: RunConfig) -> tuple[int | None, str]:
    trainer = config.trainer
    if trainer.max_steps and trainer.max_steps > 0:
        return trainer.max_steps, f"trainer.max_steps={trainer.max_steps}"
    sizes = [_size(source.path) for source in config.data.train]
    if not sizes or None in sizes:
        return None, "the number of rows is not known before the data is read: `finetune prepare` counts them"
    tokens = sum(size or 0 for size in sizes) / BYTES_PER_TOKEN
    row = option.tokens_per_step / option.facts.batch.global_size
    rows = max(tokens / row, 1.0) if config.data.packing else max(tokens / (row / 4), 1.0)
    steps = max(int(rows * trainer.num_train_epochs / option.facts.batch.global_size), 1)
    kind = "packed rows" if config.data.packing else "rows a quarter as long as they may be"
    return steps, f"{tokens:,.0f} tokens by the size of the files, {kind}"


def _size(path: str) -> int | None:
    file = Path(path).expanduser()
    if file.is_file() and file.suffix in (".jsonl", ".json", ".csv", ".tsv", ".txt"):
        return os.path.getsize(file)
    return None
