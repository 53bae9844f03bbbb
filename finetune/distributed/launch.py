"""Starts the workers through accelerate's launcher, watches them, and leaves none behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any

import psutil

from finetune.config.rules import RunFacts
from finetune.config.schema import LaunchConfig
from finetune.distributed.family import Gone, kill_family
from finetune.distributed.parent import end_with_parent
from finetune.hardware.cores import whole_cores
from finetune.paths import RunDir
from finetune.secrets import masked_file

WORKER = "finetune.training.worker"
LAUNCHED_BY = "FINETUNE_LAUNCHED_BY"
"""In the environment of every worker: the process that started and may end it."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_SECONDS = 10.0
"""How long the other ranks may take to end after one has failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workers ended."""

    exit_code: int
    failed_rank: int | None = None
    """The first rank that failed."""
    told: str = ""
    """What that rank said: its traceback, or the message of a known problem."""
    signal: str = ""
    """What killed it (`SIGKILL`), where it could not say anything."""


class Workers:
    """The processes of one run. Leaving the `with` block ends whatever is still alive."""

    def __init__(
        self,
        run_dir: RunDir,
        facts: RunFacts,
        launch: LaunchConfig,
        relay: Callable[[str], None] | None = None,
        module: str = WORKER,
    ) -> None:
        """`relay` gets rank 0's lines; null: they go to this process's own stdout. `module` is what every
        process runs, with the folder as its one argument.
        """
        self.run_dir = run_dir
        self.facts = facts
        self.launch = launch
        self.relay = relay
        self.module = module
        self.received = 0
        self.at_once = False
        """A second signal has come: nothing is waited for any more."""
        self.preparing = True
        """Until `wait`: the parent itself is at work, and a signal ends it."""
        self.killed = False
        """By us."""
        self.lost = ""
        """The signal by which somebody else has ended the launcher."""
        self._starting = True
        """Until there is a process to end: a signal is only noted."""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Workers:
        if current_thread() is main_thread():  # elsewhere signals stay with whoever owns them
            for number in STOPPING:
                self._handlers[number] = signal.signal(number, self._on_signal)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else its owner has said what it does
                self._handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            self._start()
        except BaseException:
            self._give_back_signals()
            raise
        self._starting = False
        if self.received:
            self.__exit__()
            raise SystemExit(128 + self.received)
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._give_back_signals()

    def wait(self) -> Ended:
        """Wait for the end of all workers; after one has failed the others get `GRACE_SECONDS`.

        They hear of a launcher that was killed (`end_with_parent`) and save before they end.
        """
        self.preparing = False
        failed_at: float | None = None
        while self.process.poll() is None or self._orphans():
            time.sleep(0.1)
            if failed_at is None and first_failure(self.run_dir) is not None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
                self.kill()
        if self.relay is not None:
            self._relaying.join(timeout=5)
        self._wait_for_log()
        return self._ended(self.process.returncode)

    def wait_or_leave(self) -> Ended:
        """`wait`, for work that keeps nothing: a signal that came ends the caller too."""
        ended = self.wait()
        if self.received:
            raise SystemExit(128 + self.received)
        return ended

    def kill(self) -> None:
        """End the launcher and every worker at once, also those that have lost it."""
        self.killed = True
        kill_family(self.process)
        for left in self._workers():
            with Gone():
                left.kill()
        self._wait_for_log()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _orphans(self) -> list[psutil.Process]:
        """Workers whose launcher somebody else has ended."""
        if self.process.returncode < 0 and not self.killed:
            self.lost = signal.Signals(-self.process.returncode).name
        return self._workers() if self.lost else []

    @property
    def _scratch(self) -> Path:
        """Where torch's launcher makes folders of its own; it never removes them."""
        return self.run_dir.logs / f".launcher-{self.launch.machine_rank}"

    def _start(self) -> None:
        self.run_dir.logs.mkdir(exist_ok=True)
        log = self.run_dir.launcher_log
        self._said_before = log.stat().st_size if log.exists() else 0  # by the launcher of an earlier start
        self._log = masked_file(log)
        assert self._log.stdin is not None
        with self._log.stdin as launcher_log:
            self.process = subprocess.Popen(
                accelerate_command(self.run_dir, self.facts, self.launch, self.module, self._scratch),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.relay else None,
                stderr=launcher_log,
                env=worker_environment(self.facts, self.launch),
                # a session of their own: Ctrl-C reaches this process alone, which passes it on to the workers
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        if self.relay is not None:
            self._relaying = Thread(target=self._pass_on, args=(self.relay,), daemon=True)
            self._relaying.start()

    def _give_back_signals(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _wait_for_log(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._log.wait(timeout=2)

    def _ended(self, code: int) -> Ended:
        if self.lost and not self.received:  # whatever the ranks say, they only noticed it
            told = f"The launcher, which starts and watches the ranks, was ended by {self.lost}."
            return Ended(1, None, told, self.lost)
        said = self.run_dir.launcher_log.read_bytes()[self._said_before :].decode("utf-8", errors="replace")
        killed = killed_rank(said) if code != 0 and not self.received else None
        if killed is not None:
            rank, name = killed  # the others only noticed it
            return Ended(1, rank, f"The process was ended by {name}; it could say nothing.", name)
        failure = first_failure(self.run_dir)
        if failure is not None:
            return Ended(failure["exit_code"], failure["rank"], failure["told"])
        mute = unwritten_failure(self.run_dir)
        if mute is not None:
            file = self.run_dir.failure(mute)
            return Ended(1, mute, f"It could not write down why: {file} is empty.")
        if code == 0:
            return Ended(0)
        if self.received:
            return Ended(128 + self.received)
        stopped = stopped_by_itself(self.run_dir)
        if stopped is not None:
            return Ended(stopped)
        silent, why = silent_death(said)
        return Ended(1, silent, f"{why}\nWhat the launcher said: {self.run_dir.launcher_log}")

    def _pass_on(self, relay: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            relay(line.decode("utf-8", errors="replace").rstrip("\n"))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._starting:
            self.received = number
            return
        if self.preparing:
            self.kill()  # nothing to save yet; and the block that would end them may not be entered yet
            raise SystemExit(128 + number)
        if self.received:
            self.at_once = True
            self.kill()
            return
        self.received = number
        workers = self._workers()
        if len(workers) < self.facts.num_processes // self.launch.num_machines:
            self.kill()  # some are not there yet to hear of it: nothing has been trained
            return
        for process in workers:
            with Gone():
                process.send_signal(number)

    def _workers(self) -> list[psutil.Process]:
        """Every worker that was started here, its launcher alive or not; another "machine" of this run may
        share this one with us, and its launcher and workers have the same command lines.
        """
        found = []
        for process in psutil.process_iter():
            with Gone():
                words = process.cmdline() if process.pid != self.process.pid else []
                if words[-2:] != [self.module, str(self.run_dir.path)]:
                    continue
                if process.environ().get(LAUNCHED_BY) == str(os.getpid()):
                    found.append(process)
        return found


def stopped_by_itself(run_dir: RunDir) -> int | None:
    """The exit code of a run that saved and ended before its machine goes (`checkpoint.stop_at`)."""
    if not run_dir.report.exists():
        return None
    report = json.loads(run_dir.report.read_text(encoding="utf-8"))
    return report.get("exit_code") if report.get("status") == "interrupted" else None


def accelerate_command(
    run_dir: RunDir, facts: RunFacts, launch: LaunchConfig, module: str, scratch: Path
) -> list[str]:
    """The command that starts the workers; a config file is always named, so a user's default one is never
    read.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run_dir.accelerate)]
    if launch.num_machines == 1:
        command += ["--main_process_port", str(launch.main_process_port or 0)]
    else:
        command += ["--machine_rank", str(launch.machine_rank)]
    threads = threads_per_process(facts, launch)
    return [
        *command,
        "--num_cpu_threads_per_process",
        str(threads),
        "--log_dir",
        str(scratch),
        "-m",
        module,
        str(run_dir.path),
    ]


def threads_per_process(facts: RunFacts, launch: LaunchConfig) -> int:
    """Cores of this machine shared out, unless OMP_NUM_THREADS says otherwise (accelerate's default: one)."""
    if os.environ.get("OMP_NUM_THREADS"):
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, whole_cores() // max(1, facts.num_processes // launch.num_machines))


def worker_environment(facts: RunFacts, launch: LaunchConfig) -> dict[str, str]:
    """This environment, with the package importable from wherever the run was started."""
    environment = dict(os.environ)
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["OMP_NUM_THREADS"] = str(threads_per_process(facts, launch))
    if facts.device == "cpu" and "OMP_WAIT_POLICY" not in environment:
        # GNU OpenMP spins for whole time slices: with one other busy process steps took ten times as long
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    environment["PYTHONUNBUFFERED"] = "1"
    environment[LAUNCHED_BY] = str(os.getpid())
    return environment


def first_failure(run_dir: RunDir) -> dict[str, Any] | None:
    """The failure that was written first, over all ranks; None: there is none, or it cannot be read."""
    failures = []
    for file in run_dir.logs.glob("rank-*.failed.json"):
        try:
            failures.append(json.loads(file.read_text(encoding="utf-8")))
        except json.JSONDecodeError:
            continue  # being written right now
    return min(failures, key=lambda failure: failure["time"], default=None)


def unwritten_failure(run_dir: RunDir) -> int | None:
    """A rank that has failed and could not write down why, its file begun: the disk is full."""
    empty = (file for file in sorted(run_dir.logs.glob("rank-*.failed.json")) if file.stat().st_size == 0)
    return next((int(file.name.split("-")[1].split(".")[0]) for file in empty), None)


def killed_rank(text: str) -> tuple[int, str] | None:
    """A worker that a signal ended which none of ours sends, and that signal, by what the launcher said."""
    ended = [("0", name) for name in re.findall(r"died with <Signals\.(SIG\w+):", text)]
    # all that it lists: the first one that it saw may be one that only noticed
    listed = re.findall(r"rank\s*:\s*(\d+) \(local_rank.*\n\s*exitcode\s*:\s*-(\d+)", text)
    ended += [(rank, signal.Signals(int(number)).name) for rank, number in listed]
    ours = {number.name for number in STOPPING}
    for rank, name in ended:
        if name not in ours:
            return int(rank), name
    return None


def silent_death(text: str) -> tuple[int | None, str]:
    """Rank and reason of a worker that could not speak (crashed): what the launcher saw first."""
    _, _, root_cause = text.rpartition("Root Cause")
    alone = re.search(r"returned non-zero exit status (\d+)", text)
    if alone is not None and "Root Cause" not in text:
        return 0, f"The process ended with exit code {alone[1]} without a word of its own."
    rank = re.search(r"rank\s*:\s*(\d+)", root_cause)
    code = re.search(r"exitcode\s*:\s*(-?\d+)", root_cause)
    if rank is None or code is None:
        last_lines = "\n".join(text.strip().splitlines()[-15:])
        return None, (
            "A process ended without a word of its own: something killed it (the kernel does when memory is "
            f"short: see dmesg), or it crashed outside Python. The launcher's last lines:\n{last_lines}"
        )
    number = int(code[1])
    how = f"by {signal.Signals(-number).name}" if number < 0 else f"with exit code {number}"
    return int(rank[1]), f"The process ended {how} without a word of its own."
