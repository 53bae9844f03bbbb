"""Joins a world that another launcher made: rank 0 does the parent's part, then every rank is a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from finetune.config.saved import load_config
from finetune.distributed.outer import OuterLaunch
from finetune.distributed.world import MainFailed, current_world, on_main_first
from finetune.logs import set_up_logging
from finetune.model.fetch import fetch_model
from finetune.paths import RunDir
from finetune.training.hooks import run_hook
from finetune.training.prepare import freed_when_refused, prepare_rows
from finetune.training.process import Terminal, end, guarded, keep_output
from finetune.training.room import refuse_small_disk
from finetune.training.sending import run_and_send
from finetune.training.start import check_run, open_run
from finetune.training.supervise import found_to_resume
from finetune.training.worker import run

log = logging.getLogger(__name__)

COMPLETED = "completed:"


def join(overrides: list[str], outer: OuterLaunch, say: Callable[[str], None]) -> NoReturn:
    """Run as one rank of an outer launcher's world, for as long as the process lives."""
    world = current_world()
    try:
        run_dir, completed = open_together(overrides, outer, say)
    except MainFailed as failed:
        end(failed.exit_code)
    if completed:
        end(0)
    terminal = keep_output(run_dir, world.rank)
    set_up_logging(main=world.is_main)
    config = load_config(run_dir.config)
    code = run_and_send(config, run_dir, world.is_main, lambda: guarded(run_dir, world.rank, run), log.info)
    if world.is_main:
        run_hook(config, run_dir, code, log.info)
    terminal.close_log()
    if code != 0 and not world.is_main:
        _tell(terminal, run_dir, world.rank)
    end(code)


def open_together(
    overrides: list[str], outer: OuterLaunch, say: Callable[[str], None]
) -> tuple[RunDir, bool]:
    """Check, open and prepare on rank 0 while the others wait, with no collective open; on every rank the
    folder, and whether the run in it is completed already.
    """

    def prepare() -> str:
        run = check_run(overrides, outer)
        for line in [*run.composed.notes, *run.facts.lines]:
            say(line)
        resume = found_to_resume(run, say)
        if resume is not None and resume.completed:
            return f"{COMPLETED}{resume.run_dir.path}"
        run_dir = open_run(run, resume)
        say(f"run       {run_dir.path}")
        with freed_when_refused(run, run_dir, resume):
            fetch_model(run.config.model)
            refuse_small_disk(run.config, run_dir)
            prepare_rows(run, run_dir, say)
        return str(run_dir.path)

    answer = on_main_first(current_world(), prepare)
    return RunDir(Path(answer.removeprefix(COMPLETED))), answer.startswith(COMPLETED)


def _tell(terminal: Terminal, run_dir: RunDir, rank: int) -> None:
    failure = run_dir.failure(rank)
    if failure.exists():
        terminal.write(f"rank {rank} failed; its output: {run_dir.log(rank)}\n")
        terminal.write(run_dir.log(rank).read_text(encoding="utf-8", errors="replace")[-4000:])
