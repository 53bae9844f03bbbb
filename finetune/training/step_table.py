"""The steps as a table on rank 0's terminal: a line for each that is logged, as wide as a terminal is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from finetune.progress import Stage, clock, columns, current
from finetune.training.time_left import TimeLeft
from finetune.training.trainer import RunTrainer

log = logging.getLogger(__name__)

HEAD_EVERY = 40
"""Lines, and the head stands there again."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a step; it is there where the first step that is logged has it."""

    title: str
    width: int
    """Of its figures; a blank stands before them."""
    shown: Callable[[dict[str, Any]], str]
    needs: str
    """The key of `metrics.jsonl` that it is made of."""
    first_to_go: int = 0
    """Where the terminal is too narrow for all: the highest goes first, 0 stays."""


COLUMNS = (
    Column("loss", 7, lambda step: f"{step['loss']:.4f}", "loss"),
    Column("grad", 7, lambda step: _three(step["grad_norm"]), "grad_norm"),
    Column("rate", 7, lambda step: f"{step['learning_rate']:.1e}", "learning_rate"),
    Column("tok/s/dev", 9, lambda step: f"{step['speed']:,.0f}", "speed"),
    Column("MFU", 3, lambda step: f"{step['mfu']:.0%}", "mfu"),
    Column("GB", 5, lambda step: f"{step['memory'] / 1e9:.1f}", "memory"),
    Column("card", 4, lambda step: f"{step['memory'] / step['card']:.0%}", "card", 2),
    Column("busy", 4, lambda step: f"{_mean(step['gpu_utilization']):.0f}%", "gpu_utilization", 3),
    Column("W", 4, lambda step: f"{_mean(step['gpu_watts']):.0f}", "gpu_watts", 1),
    Column("learnt", 6, lambda step: _short(step["supervised_tokens"]), "supervised_tokens"),
    Column("left", 9, lambda step: clock(step["left"]), "left"),
)
"""`tok/s/dev`, `busy` and `W` are those of one device, the mean of all; `GB` is the most that a process took
since the line before, `card` its share of the card."""


class StepTable(TrainerCallback):
    """Prints the table, the loss of each evaluation between its lines, and advances the bar below it."""

    def __init__(self, trainer: RunTrainer, time_left: TimeLeft) -> None:
        self.trainer = trainer
        self.time_left = time_left
        self.columns: list[Column] = []
        self.lines = 0
        self.bar: Stage | None = None
        """Rank 0's."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.start_clock()
        self.bar = current() if args.process_index == 0 else None
        if self.bar is not None:
            self.bar.of(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.advance()
            self.bar.ends_in(self.time_left.seconds)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if args.process_index != 0 or not logs:
            return
        if "eval_loss" in logs:
            log.info("eval      loss %.4f after step %d", logs["eval_loss"], state.global_step)
        if "loss" not in logs:
            return
        width = max(2 * len(str(state.max_steps)) + 1, len("step"))
        step = self._step(logs)
        if not self.columns:
            self.columns = fitting(step, columns() - width)
        if self.lines % HEAD_EVERY == 0:
            log.info("%s", line(f"{'step':>{width}}", self.columns, [c.title for c in self.columns]))
        self.lines += 1
        place = f"{state.global_step}/{state.max_steps}".rjust(width)
        log.info("%s", line(place, self.columns, [_value(c, step) for c in self.columns]))

    def _step(self, logs: dict[str, Any]) -> dict[str, Any]:
        """What `metrics.jsonl` has of it, and what follows from that."""
        ranks = self.trainer.ranks
        step = {**logs, **ranks, "left": self.time_left.seconds}
        kind = next((k for k in ("memory_reserved_bytes", "memory_resident_bytes") if k in ranks), None)
        if kind is not None:
            step["memory"] = max(ranks[kind])
        if kind == "memory_reserved_bytes":
            step["card"] = torch.cuda.get_device_properties(self.trainer.args.device).total_memory
        if "tokens_per_second" in logs:
            step["speed"] = logs["tokens_per_second"] / self.trainer.args.world_size
        return step


def fitting(step: dict[str, Any], room: int) -> list[Column]:
    """The columns that this step has a value for; where they are too many, the least wanted go."""
    found = [column for column in COLUMNS if step.get(column.needs) is not None]
    while sum(column.width + 1 for column in found) > room:
        last = max(found, key=lambda column: column.first_to_go)
        if not last.first_to_go:
            break
        found.remove(last)
    return found


def line(place: str, columns: list[Column], cells: list[str]) -> str:
    """Of the table; a blank parts its cells, however wide they are."""
    return place + "".join(f" {cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))


def _value(column: Column, step: dict[str, Any]) -> str:
    return column.shown(step) if step.get(column.needs) is not None else "-"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _short(count: int) -> str:
    """Three digits: 987, 12.3k, 4.56M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:  # 999,500 are 1.00M
            return f"{_three(count / size)}{unit}"
    return str(count)


def _three(value: float) -> str:
    """Three digits, zeros too; two with an exponent where that is shorter, which a column has room for."""
    text = f"{value:#.3g}".removesuffix(".")
    return f"{value:.1e}" if "e" in text or len(text) > 7 else text
