"""Curves of metrics.jsonl: each number as it was logged, time and tokens beside it, thinned with its ends."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from finetune.report.charts import charts_of
from finetune.report.metrics import Curve, Metrics, most_memory, read_metrics, usual_speed
from finetune.report.record import summary
from finetune.report.times import Start


def written(at: Path, *entries: dict[str, object]) -> Metrics:
    path = at / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    return read_metrics(path)


def step(number: int, **more: object) -> dict[str, object]:
    return {"step": number, "loss": 1 / 3 + number, "tokens": 100 * number, "tokens_per_second": 50.0, **more}


def test_a_curve_knows_steps_epochs_tokens_and_time_of_each_point(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        {"step": 0, "eval_loss": 5.0, "epoch": 0},
        step(1, epoch=0.5),
        step(2, epoch=1.0, tokens_per_second=25.0),
        {"step": 2, "eval_loss": 4.5, "epoch": 1.0},
    )
    assert found.curves["loss"].as_record() == {
        "steps": [1, 2],
        "epochs": [0.5, 1.0],
        "tokens": [100, 200],
        "seconds": [2.0, 6.0],
        "values": [1 / 3 + 1, 1 / 3 + 2],
    }
    assert found.curves["eval_loss"].as_record() == {
        "steps": [0, 2],
        "epochs": [0, 1.0],
        "tokens": [0, 200],
        "seconds": [0, 6.0],
        "values": [5.0, 4.5],
    }
    assert (found.training_seconds, found.last_step, found.notes) == (6.0, 2, [])


def test_an_axis_that_one_curve_lacks_is_not_offered(tmp_path: Path) -> None:
    whole = written(tmp_path, step(1, epoch=1))
    assert list(charts_of({"a": whole})["axes"]) == ["steps", "epochs", "tokens", "seconds"]
    old = written(tmp_path, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
    drawn = charts_of({"a": whole, "b": old})
    assert drawn["axes"] == {"steps": "steps"}
    assert drawn["unknown"] == ["epochs", "tokens", "training time"]
    assert charts_of({"a": written(tmp_path)}) == {"charts": [], "axes": {}, "unknown": []}


def test_thinning_keeps_the_ends_and_the_lowest_and_highest_of_every_stretch() -> None:
    curve = Curve()
    for place in range(100_000):
        value = -7.0 if place == 31_234 else 7.0 if place == 77_777 else math.sin(place / 500)
        for column, part in zip(curve.columns(), (place, place / 10, math.nan, 0.5, value), strict=True):
            column.append(part)
    thin = curve.thinned(1000)
    assert len(thin.values) <= 1000
    assert (thin.steps[0], thin.steps[-1]) == (0, 99_999)
    assert list(thin.steps) == sorted(thin.steps)
    points = dict(zip(thin.steps, thin.values, strict=True))
    assert (points[31_234], points[77_777]) == (-7.0, 7.0)
    whole = list(curve.values)
    assert all(whole[int(place)] == value for place, value in points.items())
    assert thin.as_record()["tokens"] == [None] * len(thin.values)
    assert curve.thinned(100_000) is curve


@pytest.mark.parametrize(
    "line", ["{", "7", "null", '{"loss": 1.0}', '{"step": "two"}', '{"step": true}', "\xff", "[" * 100_000]
)
def test_a_line_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f"{json.dumps(step(1))}\n{line}\n{json.dumps(step(2))}\n".encode("latin-1"))
    found = read_metrics(path)
    assert found.notes == ["metrics.jsonl: what cannot be read is left out: line 2."]
    assert list(found.curves["loss"].steps) == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True, [1], 10**400])
def test_a_value_that_is_no_finite_number_is_left_out_and_named(tmp_path: Path, value: object) -> None:
    found = written(tmp_path, *(step(number, loss=value) for number in range(1, 8)), step(8))
    assert list(found.curves["loss"].values) == [1 / 3 + 8]
    (note,) = found.notes
    assert note == "loss is no finite number at steps 1, 2, 3, 4, 5 and 2 more: the curve leaves it out."


def test_no_file_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    assert "is not there" in read_metrics(tmp_path / "metrics.jsonl").notes[0]
    assert "holds no step" in written(tmp_path).notes[0]


def test_the_most_memory_of_each_rank_is_kept_over_starts_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        step(1, memory_reserved_bytes=[5, 9, 3], memory_allocated_bytes=[4, 8, 2], supervised_tokens=7),
        step(2, memory_reserved_bytes=[6, 2], supervised_tokens=9, memory_watts=[1], memory_x_bytes=3),
    )
    assert found.memory == {"reserved": [6, 9, 3], "allocated": [4, 8, 2]}
    assert (found.supervised_tokens, found.step_tokens) == (9, 100)
    assert most_memory([{"reserved": 7}, {"reserved": 1}], found.memory) == [
        {"reserved": 7, "allocated": 4},
        {"reserved": 9, "allocated": 8},
        {"reserved": 3, "allocated": 2},
    ]
    assert most_memory([{"resident": 7}], {}) == [{"resident": 7}]


def test_an_evaluation_behind_the_last_logged_step_takes_no_tokens_from_a_step(
    tmp_path: Path,
) -> None:
    steps = [step(10), step(20)]
    evaluated = [{"step": at, "eval_loss": 4.5} for at in (15, 25)]
    alone = written(tmp_path, *steps)
    found = written(tmp_path, steps[0], evaluated[0], steps[1], evaluated[1])
    assert (alone.step_tokens, alone.last_step) == (100, 20)
    assert (found.step_tokens, found.last_step) == (100, 25)
    assert found.training_seconds == alone.training_seconds


def test_the_speed_leaves_out_the_first_step_of_each_start() -> None:
    speeds = {1: 1.0, 2: 60.0, 3: 1.0, 4: 50.0, 5: 40.0, 6: 30.0}
    starts = [Start(0, 1, behind) for behind in (0, 5, 2)]  # what came behind the 5th was thrown away
    assert usual_speed(speeds, starts) == 50.0
    assert usual_speed({3: 5.0}, [Start(0, 1, 2)]) == 5.0
    assert usual_speed({}, []) is None
    history = [
        {"step": at, "loss": 1.0, "supervised_tokens": at, "tokens_per_second": speed}
        for at, speed in speeds.items()
    ]
    assert summary(history, 6, starts)["tokens_per_second"] == 50.0
    assert summary(history, 6, [])["tokens_per_second"] == 40.0
