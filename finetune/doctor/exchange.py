"""Do the devices of a run compute, copy and exchange as they should? One process each, watched to its end."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from finetune.config.facts import save_facts
from finetune.config.saved import save_config
from finetune.config.schema import LaunchConfig
from finetune.distributed.accelerate import launch_file, write_launch_file
from finetune.distributed.launch import Ended, Workers
from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.collective import LOADING, Exchange, RankResult, Standing
from finetune.doctor.hangs import crash_check, last_words, told_hang, with_words
from finetune.doctor.trials import Trial
from finetune.doctor.verdicts import result_checks
from finetune.paths import RunDir
from finetune.short_lived import short_lived
from finetune.training.start import CheckedRun

log = logging.getLogger(__name__)

MODULE = "finetune.doctor.collective"
LOADING_SECONDS = 30.0
"""How much longer than for anything else they may take to load their libraries."""


def collective_checks(run: CheckedRun, timeout_seconds: float = 60) -> Iterator[Check]:
    """Start what the run would start, with a test in place of training; no process and no file is left.

    They hang when none of them has come any further for the time that is given.
    """
    port = port_check(run.config.launch)
    if port is not None:
        yield port
    if port is None or port.status != FAIL:
        yield from _tried(run, timeout_seconds)


def _tried(run: CheckedRun, timeout_seconds: float) -> list[Check]:
    with short_lived("finetune-doctor-") as path:
        folder, begun = RunDir(path), time.monotonic()
        folder.logs.mkdir()
        save_config(run.config, folder.config)
        save_facts(run.facts, folder.facts)
        launch = run.config.launch
        write_launch_file(folder.accelerate, launch_file(run.facts, launch, run.config.distributed))
        here = run.facts.num_processes // launch.num_machines
        ranks = range(launch.machine_rank * here, (launch.machine_rank + 1) * here)
        with Workers(folder, run.facts, launch, relay=log.debug, module=MODULE) as workers:
            ended = _watched(workers, ranks, timeout_seconds)
            standings, words = _read_standings(folder.path), last_words(folder, ranks)
            if ended is None:
                stopped = frozenset(s.rank for s in standings.values() if _is_stopped(s.pid))
                waited = f"after {time.monotonic() - begun:.0f} s"
                why, fix = told_hang(standings, ranks, stopped, waited, launch)
                return [Check("exchange", FAIL, with_words(why, words), fix)]
            if ended.exit_code != 0:
                return [crash_check(ended, standings, words)]
            machine = None if isinstance(run.plan, str) else run.plan.machine
            return result_checks([_read_result(folder.path, rank) for rank in ranks], machine)


def port_check(launch: LaunchConfig) -> Check | None:
    """Whether the port that the processes meet at is free on this host; None: any free one is taken."""
    port = launch.main_process_port or (29500 if launch.num_machines > 1 else None)
    if port is None or launch.machine_rank > 0:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed lately is free
        try:
            probe.bind(("", port))
        except OSError as error:
            why = f"port {port} (launch.main_process_port) cannot be taken: {error.strerror}; {_holder(port)}"
            fix = "Set launch.main_process_port to another one, or end what holds it."
            return Check("port", FAIL, why, fix)
    return Check("port", PASS, f"port {port} is free")


def _watched(workers: Workers, ranks: Sequence[int], timeout_seconds: float) -> Ended | None:
    """How the processes ended; None: they hang. A signal ends this process, and the workers with it."""
    moved, before = time.monotonic(), dict[int, Standing]()
    while workers.process.poll() is None and not list(workers.run_dir.logs.glob("rank-*.failed.json")):
        time.sleep(0.1)
        now, at = time.monotonic(), _read_standings(workers.run_dir.path)
        if at != before:
            moved, before = now, at
        loading = any(rank not in at or at[rank].stage == LOADING for rank in ranks)
        if now - moved > timeout_seconds + (LOADING_SECONDS if loading else 0.0):
            return None
    return workers.wait_or_leave()


def _read_standings(folder: Path) -> dict[int, Standing]:
    """Where the processes are, by rank; one that has not begun is not there."""
    read = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*.stage")]
    return {content["rank"]: Standing(**content) for content in read}


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _read_result(folder: Path, rank: int) -> RankResult:
    """What a process left when it was done."""
    content = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    content["trials"] = tuple(Trial(**trial) for trial in content["trials"])
    content["exchanges"] = tuple(Exchange(**exchange) for exchange in content["exchanges"])
    return RankResult(**content)


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        connections = []
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.pid is not None:
            with suppress(psutil.Error):
                words = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} has it ({words[:80]})"
    return "who has it cannot be seen from here"
