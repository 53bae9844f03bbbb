"""What do the lines of `metrics.jsonl` come to: one curve for each value, thinned where it is long?"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from finetune.report.times import Start, warm_up_steps

VALUES = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second")
POINTS = 2000
"""Of a curve that are shown at most: a screen has no more columns."""
NAMED = 5
"""Steps or lines that a note names."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One value over the run, each number as the run logged it."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    epochs: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """Of training so far; NaN here and in epochs and tokens: it was not logged."""
    values: array[float] = field(default_factory=lambda: array("d"))

    def thinned(self, points: int = POINTS) -> Curve:
        """At most so many points: the first, the last, and the lowest and highest of equal stretches."""
        count = len(self.values)
        if count <= points:
            return self
        values = np.frombuffer(self.values)
        kept = {0, count - 1}
        for part in np.array_split(np.arange(1, count - 1), (points - 2) // 2):
            kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
        chosen = sorted(kept)
        return Curve(*(array("d", np.frombuffer(column)[chosen].tolist()) for column in self.columns()))

    def columns(self) -> tuple[array[float], ...]:
        return self.steps, self.epochs, self.tokens, self.seconds, self.values

    def as_record(self) -> dict[str, list[float | None]]:
        names = ("steps", "epochs", "tokens", "seconds", "values")
        return {
            name: [None if math.isnan(value) else value for value in column]
            for name, column in zip(names, self.columns(), strict=True)
        }


@dataclass(frozen=True, slots=True)
class Metrics:
    """All that was logged."""

    curves: dict[str, Curve]
    """Those with a point at least."""
    notes: list[str]
    last_step: int | None
    training_seconds: float | None
    """Of the logged steps: their tokens by their tokens a second. Evaluations are left out."""
    step_tokens: float | None = None
    """Of a step, in the mean of all that were logged."""
    supervised_tokens: float | None = None
    """Learnt so far."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """The most of each rank by kind (`allocated`, `resident`, ...), of all starts of the run."""

    def first(self, name: str) -> float | None:
        return self.curves[name].values[0] if name in self.curves else None

    def last(self, name: str) -> float | None:
        return self.curves[name].values[-1] if name in self.curves else None

    @property
    def thinned_from(self) -> int:
        """The points of the longest curve that is not shown whole; 0: all are."""
        longest = max((len(curve.values) for curve in self.curves.values()), default=0)
        return longest if longest > POINTS else 0


def read_metrics(path: Path) -> Metrics:
    """Read line by line: a run of a million steps must not fill the memory."""
    logged, notes = _Logged(), []
    try:
        for line, entry in _entries(path):
            logged.take_up(line, entry)
    except FileNotFoundError:
        notes.append("metrics.jsonl is not there: the steps cannot be drawn.")
    except OSError as error:
        notes.append(f"metrics.jsonl cannot be read: {error.strerror}.")
    else:
        if logged.last_step is None:
            notes.append("metrics.jsonl holds no step, so there are no curves.")
    return Metrics(
        curves={name: curve for name, curve in logged.curves.items() if curve.values},
        notes=[*notes, *logged.notes()],
        last_step=logged.last_step,
        training_seconds=logged.seconds if logged.counted else None,
        step_tokens=logged.tokens / logged.counted if logged.counted else None,
        supervised_tokens=logged.supervised_tokens,
        memory=logged.memory,
    )


def usual_speed(speeds: Mapping[float, float], starts: list[Start]) -> float | None:
    """The median of the logged steps' speeds, warm-up aside where there is more."""
    warm_up = warm_up_steps(speeds, starts)
    usual = [speed for step, speed in speeds.items() if step not in warm_up]
    return median_high(usual or speeds.values()) if speeds else None


def most_memory(
    ranks: Sequence[Mapping[str, float]], logged: dict[str, list[float]]
) -> list[dict[str, float]]:
    """Of each rank and kind the most of all starts: of what this one measured and all of them logged.

    An earlier start may have had more ranks.
    """
    count = max(len(ranks), *(len(sizes) for sizes in logged.values()), 0)
    most: list[dict[str, float]] = [dict(own) for own in ranks] + [{} for _ in range(count - len(ranks))]
    for kind, sizes in logged.items():
        for own, size in zip(most, sizes, strict=False):
            own[kind] = max(own.get(kind, 0), size)
    return most


def number_or(value: Any, otherwise: float | None) -> float | None:
    """A number if it is one."""
    found = number(value)
    return otherwise if found is None else found


def number(value: Any) -> float | None:
    """A finite number as it stands; None for anything else."""
    if type(value) is not float and type(value) is not int:
        return None
    return value if abs(value) <= sys.float_info.max else None  # NaN is not, and an int may be longer


@dataclass(slots=True)
class _Places:
    """Where something was found: how often, and the first places."""

    kind: str
    count: int = 0
    named: list[int] = field(default_factory=list)

    def add(self, place: int) -> None:
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(place)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.named):,} more" if self.count > len(self.named) else ""
        return f"{self.kind}{'s' * (self.count > 1)} {', '.join(map(str, self.named))}{more}"


@dataclass(slots=True)
class _Logged:
    """What the lines that were read so far come to."""

    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in VALUES})
    last_step: int | None = None
    tokens: float = 0.0
    seconds: float = 0.0
    counted: float = 0
    """The step that tokens and seconds reach to; an evaluation may have come later."""
    supervised_tokens: float | None = None
    memory: dict[str, list[float]] = field(default_factory=dict)
    broken: _Places = field(default_factory=lambda: _Places("line"))
    not_finite: dict[str, _Places] = field(default_factory=lambda: {name: _Places("step") for name in VALUES})

    def take_up(self, line: int, entry: dict[str, Any] | None) -> None:
        step = number(entry.get("step")) if entry is not None else None
        if entry is None or step is None:
            self.broken.add(line)
            return
        self.last_step = int(step)
        self.supervised_tokens = number_or(entry.get("supervised_tokens"), self.supervised_tokens)
        self._add_memory(entry)
        speed, made = number(entry.get("tokens_per_second")), number(entry.get("tokens"))
        if speed and made is not None and made > self.tokens:
            self.seconds += (made - self.tokens) / speed
            self.tokens, self.counted = made, step
        counted = self.counted or step == 0
        so_far = (self.tokens, self.seconds) if counted else (math.nan, math.nan)
        epoch = _or_nan(entry.get("epoch"))
        for name in VALUES:
            value = number(entry.get(name))
            if value is not None:
                point = (step, epoch, *so_far, value)
                for column, part in zip(self.curves[name].columns(), point, strict=True):
                    column.append(part)
            elif name in entry:
                self.not_finite[name].add(self.last_step)

    def notes(self) -> list[str]:
        """What had to be left out."""
        notes = []
        if self.broken.count:
            notes.append(f"metrics.jsonl: what cannot be read is left out: {self.broken}.")
        for name, places in self.not_finite.items():
            if places.count:
                notes.append(f"{name} is no finite number at {places}: the curve leaves it out.")
        return notes

    def _add_memory(self, entry: dict[str, Any]) -> None:
        """Keep the most that each rank took, of every kind."""
        for name, ranks in entry.items():
            if not (name.startswith("memory_") and name.endswith("_bytes") and isinstance(ranks, list)):
                continue
            sizes = [number(size) or 0 for size in ranks]
            known = self.memory.setdefault(name.removeprefix("memory_").removesuffix("_bytes"), [])
            known += [0] * (len(sizes) - len(known))
            known[: len(sizes)] = map(max, known, sizes)


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    with path.open("rb") as file:
        for place, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield place, entry if isinstance(entry, dict) else None


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found
