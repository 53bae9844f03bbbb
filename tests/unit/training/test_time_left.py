"""The time that is left, while steps of a second are followed by evaluations of twenty."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import DefaultFlowCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.training import time_left
from finetune.training.time_left import TimeLeft, evaluations_to_come

STEP, FIRST, EVALUATION, EVERY, STEPS = 1.0, 5.0, 20.0, 4, 12


def left_after_each_step(
    monkeypatch: pytest.MonkeyPatch,
    at: Path,
    steps: int = STEPS,
    every: int = EVERY,
    *,
    on_start: bool = False,
) -> list[float]:
    now = 0.0
    monkeypatch.setattr(time_left, "perf_counter", lambda: now)
    args = TrainingArguments(output_dir=str(at), eval_strategy="steps", eval_steps=every, use_cpu=True)
    state, control, asked = TrainerState(max_steps=steps), TrainerControl(), TimeLeft()
    state.compute_steps(args, steps)
    upstream = DefaultFlowCallback()
    if on_start:
        now += EVALUATION
        asked.on_evaluate(args, state, control)
    seconds = []
    for step in range(1, steps + 1):
        asked.on_step_begin(args, state, control)
        now += FIRST if step == 1 else STEP
        state.global_step = step
        control.should_evaluate = False
        upstream.on_step_end(args, state, control)
        asked.on_step_end(args, state, control)
        seconds.append(asked.seconds)
        if control.should_evaluate:
            now += EVALUATION
            asked.on_evaluate(args, state, control)
    return seconds


@pytest.mark.parametrize("on_start", [False, True])
def test_an_evaluation_is_not_taken_for_a_slow_step(
    on_start: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = left_after_each_step(monkeypatch, tmp_path, on_start=on_start)
    assert seconds[0] == 11 * FIRST
    assert seconds[1:4] == [10, 9, 8], "the first step warms up"
    assert seconds[4:8] == [2 * EVALUATION + steps for steps in (7, 6, 5, 4)], "two are to come"
    assert seconds[8:] == [EVALUATION + steps for steps in (3, 2, 1, 0)], "the last step is evaluated too"


def test_the_first_step_warms_up_where_each_is_evaluated_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = left_after_each_step(monkeypatch, tmp_path, 10, 1)
    assert seconds[0] == 9 * FIRST, "none has been made"
    assert seconds[1:] == [left * STEP + (left + 1) * EVALUATION for left in range(8, -1, -1)]


def test_the_last_step_is_evaluated_wherever_it_falls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = left_after_each_step(monkeypatch, tmp_path, 10)
    assert seconds[4:8] == [2 * EVALUATION + steps for steps in (5, 4, 3, 2)]
    assert seconds[8:] == [EVALUATION + steps for steps in (1, 0)]


@pytest.mark.parametrize(("epoch", "to_come"), [(0.5, 3), (1.0, 3), (1.5, 2), (3.0, 1)])
def test_each_epoch_has_one(epoch: float, to_come: int, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), eval_strategy="epoch", use_cpu=True)
    assert evaluations_to_come(args, TrainerState(epoch=epoch, num_train_epochs=3)) == to_come
