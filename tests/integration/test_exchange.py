"""Processes that compute and exchange before a run does: what is told of them, of a hang, of a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.checklist import NAME
from finetune.doctor.collective import LOADING
from finetune.doctor.exchange import collective_checks
from finetune.training.start import CheckedRun, check_run
from tests.front_door import assert_all_gone, environment, wait_for

TWO = ("launch.device=cpu", "launch.num_processes=2")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the checks make their folder; no process of theirs and no file is left afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    assert_all_gone(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_exchange_right_numbers_and_are_timed(scratch: Path) -> None:
    checks = by_name(collective_checks(check_run(["recipe=tiny_qlora", "distributed=zero2", *TWO])))
    assert {check.status for check in checks.values()} == {PASS}, checks
    assert [name for name in checks if len(name) > NAME] == []  # the column that a checklist has for them
    for name in ("all-reduce", "all-gather", "reduce-scatter"):
        assert f"{name} of 1 MiB" in checks["small exchange"].detail
    told = checks["exchange"].detail
    assert "2 processes, gloo: " in told
    assert "all-reduces of 16 MiB bf16 a second (3 warm-ups, mean of 10)" in told
    assert "not judged" in told
    assert "matrix product off by " in checks["fp32"].detail
    assert "nf4 and back is off by 9" in checks["bitsandbytes"].detail
    compiled = r": deepspeed_shm_comm is compiled( when the first run starts, in a minute or two)?$"
    assert re.search(compiled, checks["DeepSpeed"].detail)


def test_one_process_is_tried_and_has_nothing_to_exchange(scratch: Path) -> None:
    checks = by_name(collective_checks(check_run(["recipe=tiny_lora", "launch.device=cpu"])))
    assert checks["exchange"] == Check("exchange", PASS, "one device: nothing to exchange")
    assert checks["fp32"].status == PASS
    assert "port" not in checks


def test_a_rank_that_hangs_is_named_with_the_exchange_that_the_others_wait_in(scratch: Path) -> None:
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    # loading bitsandbytes takes rank 1 a second or more: it is stopped before it comes to an exchange
    checks = disturbed(check_run(["recipe=tiny_qlora", "distributed=ddp", *TWO]), "bitsandbytes", stop)
    assert [check.status for check in checks] == [FAIL]
    assert (
        f"rank 1 (pid {pids[0]}, cpu) never came to 'the first exchange', where rank 0 waits"
        in checks[0].detail
    )
    assert "it was in 'bitsandbytes'; its process is stopped" in checks[0].detail
    assert checks[0].fix == f"kill -CONT {pids[0]} lets such a process go on."
    assert not psutil.pid_exists(pids[0])


def test_a_terminal_that_closes_ends_it_and_leaves_nothing(scratch: Path) -> None:
    at = scratch / "elsewhere"
    at.mkdir()
    words = [sys.executable, "-m", "finetune", "doctor", "recipe=tiny_lora", "distributed=ddp", *TWO]
    env, pipe = environment(TMPDIR=str(scratch), HF_HUB_OFFLINE="1"), subprocess.PIPE
    with subprocess.Popen(words, cwd=at, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for("rank 1", lambda: bool(standings_of_rank_1()))
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 129
    assert err.strip() == "doctor was interrupted by SIGHUP: nothing is left of it"
    assert " pass  data " in out  # what was known before
    assert "exchange" not in out
    at.rmdir()  # nothing was made there; `scratch` sees that no process and no file is left elsewhere


@pytest.mark.soak
def test_a_rank_that_is_killed_is_named_with_the_place_where_it_was(scratch: Path) -> None:
    pids: list[int] = []

    def kill(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGKILL)

    checks = disturbed(check_run(["recipe=tiny_qlora", "distributed=ddp", *TWO]), "bitsandbytes", kill)
    assert [check.status for check in checks] == [FAIL]
    assert f"rank 1 (pid {pids[0]}, cpu) ended in 'bitsandbytes': " in checks[0].detail
    assert "SIGKILL" in checks[0].detail


@pytest.mark.soak
def test_an_exchange_that_is_slow_and_moves_is_no_hang(scratch: Path) -> None:
    """Rank 1 halts for a while wherever it comes to: all halts together take longer than a hang may."""
    patience, pause = 12.0, 5.0
    done, halts = Event(), list[str]()

    def brake() -> None:
        before = ""
        while not done.is_set():
            time.sleep(0.01)
            for standing in standings_of_rank_1():
                stage = standing["stage"]
                if stage not in (before, LOADING):
                    before = stage
                    halts.append(stage)
                    with suppress(ProcessLookupError):
                        os.kill(standing["pid"], signal.SIGSTOP)
                        time.sleep(pause)
                        os.kill(standing["pid"], signal.SIGCONT)

    watcher = Thread(target=brake)
    watcher.start()
    try:
        run = check_run(["recipe=tiny_lora", "distributed=ddp", *TWO])
        checks = list(collective_checks(run, timeout_seconds=patience))
    finally:
        done.set()
        watcher.join()
    assert {check.status for check in checks} == {PASS}, checks
    assert len(halts) * pause > patience


def test_a_port_that_is_taken_is_told_with_its_holder_before_anything_starts(scratch: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = check_run(["recipe=tiny_lora", "distributed=ddp", *TWO, f"launch.main_process_port={port}"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        checks = list(collective_checks(run))
    assert [(check.name, check.status) for check in checks] == [("port", FAIL)]
    assert f"port {port} (launch.main_process_port) cannot be taken" in checks[0].detail
    assert f"process {os.getpid()} has it" in checks[0].detail


def disturbed(run: CheckedRun, stage: str, disturb: Callable[[int], None]) -> list[Check]:
    """The checks while something happens to rank 1 in a stage."""
    found: list[int] = []

    def there() -> bool:
        found.extend(standing["pid"] for standing in standings_of_rank_1() if standing["stage"] == stage)
        return bool(found)

    def watch() -> None:
        wait_for(f"rank 1 in {stage}", there, pause=0.01)
        disturb(found[0])

    watcher = Thread(target=watch)
    watcher.start()
    checks = list(
        collective_checks(run, timeout_seconds=20)
    )  # a busy machine takes a while to come to an exchange
    watcher.join()
    return checks


def standings_of_rank_1() -> list[dict[str, Any]]:
    """Where it is, if it has begun."""
    return [json.loads(file.read_text()) for file in Path(tempfile.gettempdir()).glob("*/rank-1.stage")]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}
