"""Joins a world that another launcher made: rank 0 does the parent's part, then every rank is a worker."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import NoReturn

from finetune.distributed.launch import first_failure
from finetune.distributed.outer import OuterLaunch
from finetune.distributed.output import Terminal
from finetune.distributed.world import MainFailed, current_world, on_main_first
from finetune.errors import RUN_FAILED
from finetune.logs import set_up_logging
from finetune.model.fetch import fetch_model
from finetune.paths import RunDir
from finetune.report.page import page_at_end
from finetune.report.record import report_diagnosis
from finetune.training.diagnosis import Before, diagnose, look_before
from finetune.training.hooks import run_hook
from finetune.training.lock import held
from finetune.training.prepare import freed_when_refused, prepare_rows
from finetune.training.process import end, guarded, keep_output
from finetune.training.room import refuse_small_disk
from finetune.training.sending import Sending
from finetune.training.start import check_run, describe_machine, open_run
from finetune.training.supervise import found_to_resume
from finetune.training.worker import run

log = logging.getLogger(__name__)

COMPLETED = "completed:"


def join(overrides: list[str], outer: OuterLaunch, say: Callable[[str], None]) -> NoReturn:
    """Run as one rank of an outer launcher's world, for as long as the process lives."""
    world, lock = current_world(), ExitStack()  # the lock goes with the process
    try:
        run_dir, completed = open_together(overrides, outer, say, lock)
    except MainFailed as failed:
        end(failed.exit_code)
    if completed:
        end(0)
    terminal = keep_output(run_dir, world.rank)
    set_up_logging(main=world.is_main)
    work = partial(guarded, run_dir, world.rank, run)
    before = look_before(run_dir)
    with outliving_sigterm():
        code = run_to_its_end(before, work, log.info) if world.is_main else work()
        terminal.close_log()
        if code != 0 and not world.is_main:
            _tell(terminal, before, world.rank)
    end(code)


def open_together(
    overrides: list[str], outer: OuterLaunch, say: Callable[[str], None], lock: ExitStack
) -> tuple[RunDir, bool]:
    """Check, open and prepare on rank 0 while the others wait, with no collective open; on every rank the
    folder, and whether the run in it is completed already. Rank 0 holds the folder until `lock` is left.
    """

    def prepare() -> str:
        run = check_run(overrides, outer)
        for line in run.lines:
            say(line)
        resume = found_to_resume(run, say)
        if resume is not None and resume.completed:
            return f"{COMPLETED}{resume.run_dir.path}"
        if resume is not None:
            lock.enter_context(held(resume.run_dir))
        run_dir = open_run(run, resume)
        if resume is None:
            lock.enter_context(held(run_dir, run.config.launch.machine_rank))
        say(f"run       {run_dir.path}")
        describe_machine(run_dir)
        with freed_when_refused(run, run_dir, resume):
            fetch_model(run.config.model)
            refuse_small_disk(run.config, run.facts, run_dir)
            prepare_rows(run, run_dir, say)
        return str(run_dir.path)

    answer = on_main_first(current_world(), prepare)
    return RunDir(Path(answer.removeprefix(COMPLETED))), answer.startswith(COMPLETED)


def run_to_its_end(before: Before, work: Callable[[], int], say: Callable[[str], None]) -> int:
    """Rank 0's part of a run in a world that another launcher made: send it beside the training, and call the
    user's command when all of it is there. Returns the exit code.
    """
    code, lost = RUN_FAILED, ""
    with ExitStack() as outliving, Sending(before.config, before.run_dir, say) as sending:
        outliving.enter_context(outliving_sigterm())
        sending.start()
        try:
            code = work()
            if code == 0:
                outliving.close()
            else:
                for line in _diagnosis_lines(before, 0, say):
                    say(line)
        finally:
            lost = sending.finish(code)
            if lost:
                say(f"WARNING   {lost}")
            code = code or (RUN_FAILED if lost else 0)
            run_hook(before.config, before.run_dir, code, say)
    return code


@contextmanager
def outliving_sigterm() -> Iterator[None]:
    """Go on through the signal that a launcher sends to every rank when one has failed (torchrun's SIGKILL
    follows half a minute later): why is told, and the user's command called. Training itself hears it.
    """
    if current_thread() is not main_thread():  # a notebook's: signals stay with whoever owns them
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _diagnosis_lines(before: Before, rank: int, say: Callable[[str], None]) -> list[str]:
    """The known cause of a failure, which goes into the report; told by the rank that it is about.

    Rank 0 tells it for a rank that could say nothing, and rank 1 for rank 0; and it makes the page where no
    cause is known.
    """
    failed = first_failure(before.run_dir) is not None
    found = diagnose(before) if failed else None
    if found is None:
        if failed and rank == 0:
            page_at_end(before.run_dir, say)
        return []
    speaker = found.rank or 0
    if not before.run_dir.failure(speaker).exists():
        speaker = 0 if speaker else 1
    if rank != speaker:
        return []
    with suppress(OSError):  # a full disk
        report_diagnosis(before.run_dir, found.record, say)
    return found.lines


def _tell(terminal: Terminal, before: Before, rank: int) -> None:
    run_dir = before.run_dir
    failure = run_dir.failure(rank)
    if failure.exists():
        for line in _diagnosis_lines(before, rank, lambda told: terminal.write(f"{told}\n")):
            terminal.write(f"{line}\n")
        terminal.write(f"rank {rank} failed; its output: {run_dir.log(rank)}\n")
        terminal.write(run_dir.log(rank).read_text(encoding="utf-8", errors="replace")[-4000:])
