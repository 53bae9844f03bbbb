"""How many rows make one optimizer step, and the learning rate that goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from finetune.config.schema import ScaleLearningRate
from finetune.config.trainer_fields import AUTO
from finetune.errors import Problem


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one optimizer step."""

    per_device: int
    accumulation: int
    processes: int

    @property
    def global_size(self) -> int:
        return self.per_device * self.accumulation * self.processes

    @property
    def line(self) -> str:
        """The arithmetic, as it is printed."""
        passes = _passes(self.per_device, self.processes)
        return f"global batch {self.global_size} = {passes} x {self.accumulation} accumulation"


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate in force, and how it came about."""

    value: float
    line: str = ""
    """The arithmetic when it was scaled."""
    advice: str = ""


def resolve_batch(trainer: Any, processes: int, problems: list[Problem]) -> Batch:
    """Accumulation from `global_batch_size`, or as set; one that does not divide is a problem."""
    per_device = trainer.per_device_train_batch_size
    wanted, accumulation = trainer.global_batch_size, trainer.gradient_accumulation_steps
    if per_device == AUTO:  # the planner settles it; what is learnt from is the global batch
        problems += _without_size(wanted, accumulation)
        per_device, accumulation = 1, None
    one_pass = per_device * processes
    if min(per_device, processes, wanted or 1, accumulation or 1) < 1:
        return Batch(1, 1, max(processes, 1))  # told as a problem of the value's range
    if wanted is None:
        return Batch(per_device, accumulation or 1, processes)
    if wanted % one_pass:
        problems.append(_not_divisible(wanted, per_device, processes))
        return Batch(per_device, max(wanted // one_pass, 1), processes)
    if accumulation is not None and accumulation != wanted // one_pass:
        problems.append(
            Problem(
                f"trainer.gradient_accumulation_steps={accumulation} and trainer.global_batch_size={wanted}",
                f"{_passes(per_device, processes)} x {accumulation} accumulation = {one_pass * accumulation}",
                f"Leave gradient_accumulation_steps out: it becomes {wanted // one_pass}.",
            )
        )
    return Batch(per_device, wanted // one_pass, processes)


def resolve_learning_rate(trainer: Any, batch: Batch, problems: list[Problem]) -> LearningRate:
    """The rate after `scale_learning_rate`; off by default, and then at most a suggestion."""
    rule, base = trainer.scale_learning_rate, trainer.base_global_batch_size
    usual = ScaleLearningRate.linear if "sgd" in (trainer.optim or "") else ScaleLearningRate.sqrt
    kind = "SGD" if usual is ScaleLearningRate.linear else "Adam and its kin"
    if base is None:
        if rule is not ScaleLearningRate.none:
            problems.append(
                Problem(
                    f"trainer.scale_learning_rate={rule.value}",
                    "nothing says which global batch learning_rate was chosen for",
                    "Set trainer.base_global_batch_size.",
                )
            )
        return LearningRate(trainer.learning_rate)
    ratio = batch.global_size / max(base, 1)
    if rule is ScaleLearningRate.none:
        advice = (
            f"trainer.learning_rate={trainer.learning_rate:g} was chosen for a global batch of {base}, "
            f"this run has {batch.global_size}: {usual.value} scaling is usual for {kind} "
            f"(trainer.scale_learning_rate={usual.value}), with warm-up"
        )
        return LearningRate(trainer.learning_rate, advice=advice if ratio != 1 else "")
    is_sqrt, term = rule is ScaleLearningRate.sqrt, f"{batch.global_size} / {base}"
    value = trainer.learning_rate * (math.sqrt(ratio) if is_sqrt else ratio)
    term = f"sqrt({term})" if is_sqrt else term
    advice = "" if rule is usual else f"{usual.value} scaling is usual for {kind}, {rule.value} was asked for"
    if ratio > 1 and trainer.warmup_steps == 0:
        advice = f"{advice}; " if advice else ""
        advice += "a scaled-up learning rate wants warm-up: trainer.warmup_steps=0.03"
    return LearningRate(value, f"learning rate {value:g} = {trainer.learning_rate:g} x {term}", advice)


def _without_size(wanted: int | None, accumulation: int | None) -> list[Problem]:
    """What keeps a micro batch from being chosen by what fits."""
    where = f"trainer.per_device_train_batch_size={AUTO}"
    if wanted is None:
        why = "the rows of an optimizer step must not depend on the memory of a card"
        return [Problem(where, why, "Set trainer.global_batch_size.")]
    if accumulation is not None:
        why = f"trainer.gradient_accumulation_steps={accumulation} would decide the size"
        return [Problem(where, why, "Leave gradient_accumulation_steps out.")]
    return []


def _not_divisible(wanted: int, per_device: int, processes: int) -> Problem:
    one_pass = per_device * processes
    below, above = wanted // one_pass * one_pass, (wanted // one_pass + 1) * one_pass
    fix = f"Nearest: {below} or {above}." if below else f"Nearest: {above}."
    if wanted % processes == 0:
        share = wanted // processes
        fitting = max(d for d in range(1, per_device + 1) if share % d == 0)
        fix += f" Or keep it with trainer.per_device_train_batch_size={fitting}."
    return Problem(
        f"trainer.global_batch_size={wanted}",
        f"not a multiple of {_passes(per_device, processes)} = {one_pass}",
        fix,
    )


def _passes(per_device: int, processes: int) -> str:
    return f"{per_device} per device x {processes} process{'es' * (processes > 1)}"
