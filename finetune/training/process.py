"""What surrounds a run in its process: output of every rank in a file, a failure on record, no process left
behind.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import torch
import torch.distributed as dist
from transformers.integrations import unset_hf_deepspeed_config

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig
from finetune.config.strategy import TRAITS, Engine
from finetune.distributed.cpu import cpu_stand_in
from finetune.distributed.output import Terminal, print_into
from finetune.distributed.parent import end_with_parent
from finetune.distributed.world import World, announce_failure, open_process_group
from finetune.errors import FinetuneError
from finetune.logs import set_up_logging
from finetune.paths import RunDir, append_whole
from finetune.report.record import report_end
from finetune.secrets import masked
from finetune.training.tracking import tracker_environment


def run_process(run_dir: RunDir, work: Callable[[RunDir], int]) -> NoReturn:
    """Run `work` as the whole life of a process that our launcher started, and end with its exit code."""
    rank = int(os.environ.get("RANK", "0"))
    end_with_parent()
    terminal = keep_output(run_dir, rank)
    set_up_logging(main=rank == 0)
    last_words: list[str] = []
    code = guarded(run_dir, rank, work, last_words.append)
    for told in last_words:  # into the log alone: the parent tells them on the terminal
        terminal.close_log()
        with suppress(OSError):
            append_whole(run_dir.log(rank), masked(told).encode("utf-8", errors="backslashreplace"))
    end(code, terminal)


def end(code: int, terminal: Terminal | None = None) -> NoReturn:
    """Leave the process: no interpreter shutdown, since after a failure threads of a collective may never
    end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    if terminal is not None:
        terminal.close_log()
    os._exit(code)


def _to_stderr(told: str) -> None:
    sys.stderr.write(told)


def guarded(
    run_dir: RunDir, rank: int, work: Callable[[RunDir], int], tell: Callable[[str], None] = _to_stderr
) -> int:
    """Run `work`; a failure goes into the run folder, to the other ranks, and becomes an exit code."""
    try:
        return work(run_dir)
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException as error:  # noqa: BLE001 - the end of the process: every failure becomes a record
        known = isinstance(error, FinetuneError)
        code = error.exit_code if isinstance(error, FinetuneError) else 1
        told = str(error) if known and "FINETUNE_DEBUG" not in os.environ else traceback.format_exc()
        recorded = record_failure(run_dir, rank, told, code)
        announce_failure()
        (tell if recorded else _to_stderr)(told.rstrip() + "\n")
        return code


def record_failure(run_dir: RunDir, rank: int, told: str, code: int) -> bool:
    """Write it down for the parent; False: the disk is full, and it can only be told here."""
    content = {"rank": rank, "time": time.time(), "exit_code": code, "told": masked(told)}
    try:
        run_dir.failure(rank).write_text(json.dumps(content), encoding="utf-8")
        report_end(run_dir, "failed", told)
    except OSError:
        return False
    return True


def keep_output(run_dir: RunDir, rank: int) -> Terminal:
    """Send everything this process prints to its file; rank 0's goes to the terminal too."""
    # a tracker that listens to sys.stdout would upload what is printed before it is masked
    os.environ.setdefault("WANDB_CONSOLE", "off")
    return print_into(run_dir.log(rank), terminal=rank == 0)


@contextmanager
def strategy_environment(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> Iterator[World]:
    """The process group and stand-ins of a strategy; what it leaves here is taken back at the end."""
    engine = TRAITS[facts.strategy].engine
    before, linear = dict(os.environ), torch.nn.functional.linear
    with ExitStack() as stack:
        os.environ.update(tracker_environment(config.tracking.report_to, run_dir))
        world = open_process_group(engine, facts.device, int(config.trainer.ddp_timeout))
        if engine is Engine.fsdp2 and facts.device == "cpu":
            stack.enter_context(cpu_stand_in())
        try:
            yield world
        finally:
            unset_hf_deepspeed_config()
            # ZeRO-3 puts a wrapper here and leaves it
            torch.nn.functional.linear = linear
            os.environ.clear()
            os.environ.update(before)
