"""What a run cost: over all its starts, at least what its steps took, and no sum without a price."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.paths import RunDir
from finetune.report.cost import Cost, cost_of
from finetune.report.reading import read_run

FACTS = {"num_processes": 8, "device": "cuda"}
HARDWARE = {"price_per_hour": 20.0, "currency": "EUR", "minimum_minutes": 0.0}
STEPS = [{"step": step, "loss": 1.0, "tokens": 1000 * step, "tokens_per_second": 100.0} for step in (1, 2, 3)]


def cost(at: Path, times: list[dict[str, float]], hardware: Any = HARDWARE, facts: Any = FACTS) -> Cost:
    (at / "facts.json").write_text(json.dumps(facts))
    (at / "config.yaml").write_text(f"{json.dumps({'hardware': hardware, 'launch': {'num_machines': 2}})}\n")
    (at / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in STEPS))
    (at / "times.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in times))
    return cost_of(read_run(RunDir(at)))


def test_all_starts_of_a_run_add_up(tmp_path: Path) -> None:
    found = cost(
        tmp_path, [{"started": 100}, {"ended": 1000}, {"started": 5000}, {"ended": 5800}, {"ended": 5900}]
    )
    assert (found.seconds, found.how) == (1800, "from 2 starts to the end, loading the model included")
    assert (found.device_hours, found.device) == (4.0, "GPU")
    assert (found.money, found.currency, found.no_money) == (20.0, "EUR", "")  # two machines, half an hour
    assert found.training_seconds == 30


def test_a_start_without_an_end_makes_it_a_lower_bound(tmp_path: Path) -> None:
    found = cost(tmp_path, [{"started": 100}, {"started": 200}, {"ended": 210}])
    assert (found.seconds, found.how) == (30, "at least: 1 of 2 starts left no end")
    assert cost(tmp_path, []).how == "at least: its start was not written"
    with RunDir(tmp_path).lock.open("w") as lock:  # the last start has ended, the run still looks back at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = cost(tmp_path, [{"started": 100}, {"started": 200}, {"ended": 210}])
    assert again == found


def test_a_running_start_counts_until_now(tmp_path: Path) -> None:
    times: list[dict[str, float]] = [{"started": 100}, {"ended": 200}, {"started": 300}]
    cost(tmp_path, times)
    with RunDir(tmp_path).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = cost_of(read_run(RunDir(tmp_path)), now=450)
    assert (found.seconds, found.how) == (250, "from 2 starts to the end so far, loading the model included")


def test_the_shortest_time_that_is_billed_is_paid(tmp_path: Path) -> None:
    times = [{"started": 0.0}, {"ended": 60.0}]
    assert cost(tmp_path, times, {**HARDWARE, "minimum_minutes": 60}).money == 40.0


@pytest.mark.parametrize(
    ("hardware", "why"),
    [({**HARDWARE, "price_per_hour": None}, "hardware.price_per_hour is not set"), (None, "price_per_hour")],
)
def test_without_a_price_there_is_no_sum(tmp_path: Path, hardware: Any, why: str) -> None:
    found = cost(tmp_path, [{"started": 0}, {"ended": 9}], hardware)
    assert found.money is None
    assert why in found.no_money


def test_what_nobody_wrote_down_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "times.jsonl").write_text('{"ended": 5}\n7\n{"started": "x"}\n{"star')
    found = cost_of(read_run(RunDir(tmp_path)))
    assert (found.seconds, found.device_hours, found.money) == (None, None, None)
    assert found.how.startswith("its time is not known")
    assert found.no_money == "config.yaml could not be read"
