"""How long until the run is over? Steps and evaluations are counted apart: not every step has one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class TimeLeft(TrainerCallback):
    """`seconds`: what the steps and evaluations that are to come will take, as those before them did.

    A step lasts from the end of the one before, or of its evaluation: its rows and checkpoints are part of
    it. The first one, which warms up, counts only while it is the only one, an evaluation once one has been
    made.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        self._first: float | None = None
        self._later, self._evaluations = _Mean(), _Mean()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._since is None:
            self._since = perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        took = self._passed()
        if self._first is None:
            self._first = took
        else:
            self._later.add(took)
        step = self._later.value or self._first
        steps, evaluations = state.max_steps - state.global_step, evaluations_to_come(args, state)
        self.seconds = steps * step + evaluations * self._evaluations.value

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._since is not None:  # the first step has begun: what comes before it is none of its time
            self._evaluations.add(self._passed())

    def _passed(self) -> float:
        """Seconds since the last step or evaluation ended."""
        assert self._since is not None, "a step begins before it ends"
        now = perf_counter()
        passed, self._since = now - self._since, now
        return passed


def evaluations_to_come(args: TrainingArguments, state: TrainerState) -> int:
    """With the one that is due behind this step."""
    if args.eval_strategy == "steps":
        # the last step has one in any case
        return math.ceil(state.max_steps / state.eval_steps) - (state.global_step - 1) // state.eval_steps
    if args.eval_strategy == "epoch":
        return state.num_train_epochs - math.ceil(state.epoch or 0.0) + 1
    return 0
