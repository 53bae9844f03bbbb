"""`finetune scale`: real short runs with one and two processes, measured, drawn and judged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.front_door import assert_all_gone, environment, finetune, processes_of, wait_for

SMALL = ("recipe=tiny_full", "launch.device=cpu", "trainer.global_batch_size=4", "trainer.max_steps=6")


def started_at(at: Path, *words: str) -> subprocess.Popen[str]:
    """`finetune scale` in the background, with its temporary files below `at`."""
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", "scale", *SMALL, *words],
        cwd=at,
        env=environment(TMPDIR=str(at)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers_of(at: Path, name: str) -> list[psutil.Process]:
    """The processes that train the run `name`, without their launcher."""
    return [
        process
        for process in processes_of(at)
        if "finetune.training.timed" in process.cmdline()
        and process.cmdline()[-1].endswith(f"/{name}")
        and "accelerate.commands.launch" not in process.cmdline()
    ]


@pytest.mark.slow
def test_one_and_two_processes_are_run_measured_drawn_and_judged(tmp_path: Path) -> None:
    words = ("distributed=ddp", "launch.num_processes=[1,2]", "--json")
    done = finetune("scale", *SMALL, *words, at=tmp_path, TMPDIR=str(tmp_path))
    assert done.code == 0, done.err
    record = json.loads(done.out)
    one, two = record["points"]
    told = [line for line in done.err.splitlines() if "process" in line]
    assert [line.partition(":")[0] for line in told] == [
        *("run 1 of 2", "1 process under ddp", "run 2 of 2", "2 processes under ddp")
    ]
    assert f": {one['tokens_per_second']:,.0f} tokens/s, " in told[1]
    for point, count in ((one, 1), (two, 2)):
        assert (point["num_processes"], point["strategy"]) == (count, "ddp")  # as the runs' reports have it
        batch = {"per_device": 2, "accumulation": 2 // count, "processes": count, "global": 4}
        assert point["batch"] == batch
        assert point["steps"] == 6
        lower, upper = point["step_seconds_spread"]
        assert 0 < lower <= point["step_seconds"] <= upper
        assert point["threads_per_process"] == 1
        assert 100e6 < point["peak_bytes"] < 10e9
        assert 0 <= point["data_share"] < 1
    assert (one["speedup"], one["efficiency"]) == (1, 1)
    assert two["speedup"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    # gradients of two processes are exchanged in every step: gloo must have been seen at it
    assert 0.001 < two["communication_share"] < 1
    assert one["communication_share"] < two["communication_share"]
    assert record["hold"] == "global"
    assert "says nothing of cards" in record["verdict"]
    plot = Path(record["plot"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.parent.parent == tmp_path
    assert json.loads((plot.parent / "scale.json").read_text()) == record
    assert not list(tmp_path.glob("finetune-scale-*"))  # the runs are removed
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_a_run_that_fails_ends_it_with_what_was_measured_before(tmp_path: Path) -> None:
    process = started_at(tmp_path, "distributed=ddp", "launch.num_processes=[1,2]")
    try:
        wait_for("second run", lambda: len(workers_of(tmp_path, "2-ddp")) == 2)
        workers_of(tmp_path, "2-ddp")[0].kill()
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "failed: 2 processes under ddp: rank " in err
    assert "SIGKILL" in err
    assert "1 x ddp" in out
    (file,) = tmp_path.glob("scale-*/scale.json")
    record = json.loads(file.read_text())
    assert [point["num_processes"] for point in record["points"]] == [1]
    assert "SIGKILL" in record["failed"]
    assert_all_gone(tmp_path)
    assert not list(tmp_path.glob("finetune-scale-*"))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    process = started_at(tmp_path, "launch.num_processes=[2]", "--json")
    try:
        wait_for("run", lambda: len(workers_of(tmp_path, "2-auto")) == 2)
        assert list(tmp_path.glob("finetune-scale-*"))
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert json.loads(out)["exit_code"] == 128 + number
    assert "kept: nothing, no run had ended" in err
    assert_all_gone(tmp_path)
    assert not list(tmp_path.glob("*scale-*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--hold", "rows"), "--hold rows: expected one of global, micro"),
        (("launch.num_processes=[1,two]",), "launch.num_processes=[1,two]: expected numbers of processes"),
        (("launch.num_processes=[1,3]",), "trainer.global_batch_size=4: not a multiple of 2 per device x 3"),
        (("runs/X",), "'runs/X' is no key=value"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    done = finetune("scale", *SMALL, *words, "--json", at=tmp_path, TMPDIR=str(tmp_path))
    assert done.code == 2, done.err
    assert told in done.err
    assert json.loads(done.out)["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_around_it_is_refused(tmp_path: Path) -> None:
    done = finetune("scale", *SMALL, "--json", at=tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.code == 2, done.err
    assert "scale starts processes of its own" in done.err
