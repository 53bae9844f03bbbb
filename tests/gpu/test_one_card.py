"""One card in five minutes: doctor, three methods on half a billion weights, memory against its forecast."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.front_door import REPOSITORY, environment

NEAR = 0.15
"""Largest difference between the peak that was forecast and the one that torch counted."""


def told_by_the_script(device: str) -> dict[str, Any]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py"), "--device", device, "--json"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)  # shown with -rA: the figures are what such a machine is rented for
    return json.loads(done.stdout.splitlines()[-1])


def assert_as_asked(told: dict[str, Any], device: str) -> None:
    assert [run["method"] for run in told["runs"]] == ["lora", "qlora", "full"]
    for run in told["runs"]:
        assert (run["strategy"], run["device"]) == ("single", device)
        assert run["verified"]
        assert run["tokens_per_second"] > 0


@pytest.mark.gpu
def test_one_card_runs_three_methods_within_their_forecast() -> None:
    told = told_by_the_script("cuda")
    assert told["doctor"]["ok"]
    assert_as_asked(told, "cuda")
    for run in told["runs"]:
        assert run["measured_bytes"] == pytest.approx(run["planned_bytes"]["expected"], rel=NEAR)
        assert run["measured_bytes"] <= run["planned_bytes"]["upper"]
        assert run["gpu_watts"], "NVML told no power at any step"
        assert all(10 < watts < 2000 for watts in run["gpu_watts"])


@pytest.mark.soak
def test_the_same_script_runs_on_a_cpu() -> None:
    told = told_by_the_script("cpu")
    assert told["doctor"]["ok"]
    assert_as_asked(told, "cpu")
