"""The parent of a run: starts the workers, prepares the data beside them, waits, and says how they ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.distributed.launch import Ended, Workers
from finetune.errors import RUN_FAILED, FinetuneError, RunFailed, UserError
from finetune.model.fetch import fetch_model
from finetune.paths import RunDir
from finetune.report.record import report_diagnosis, report_end
from finetune.secrets import masked_file
from finetune.training.diagnosis import Before, diagnose, diagnose_error, look_before
from finetune.training.hooks import run_hook
from finetune.training.lock import held
from finetune.training.prepare import freed_when_refused, prepare_rows, refuse_other_rows
from finetune.training.pull import brought_here
from finetune.training.resume import NEVER, Resume, resume_lines
from finetune.training.room import refuse_small_disk
from finetune.training.sending import Sending
from finetune.training.start import CheckedRun, describe_machine, open_run, to_resume

Say = Callable[[str], None]
STOPPED_EARLY = "stopped before the first step"


def start_and_wait(
    run: CheckedRun,
    say: Say,
    relay: Say | None = None,
    resume: Resume | None = None,
    opened: Callable[[RunDir], None] = lambda run_dir: None,
) -> tuple[RunDir, Ended]:
    """Run to the end. The workers start before the data is prepared: they load their libraries meanwhile.

    `opened` is called once the run has its folder.
    """
    if resume is not None:
        with held(resume.run_dir):
            opened(open_run(run, resume))
            return _start_and_wait(run, resume.run_dir, say, relay, resume)
    run_dir = open_run(run)
    with held(run_dir, run.config.launch.machine_rank):
        opened(run_dir)
        return _start_and_wait(run, run_dir, say, relay, resume)


def _start_and_wait(
    run: CheckedRun, run_dir: RunDir, say: Say, relay: Say | None, resume: Resume | None
) -> tuple[RunDir, Ended]:
    say(f"run       {run_dir.path}")
    before = look_before(run_dir)
    with Sending(run.config, run_dir, say) as sending:
        try:
            with freed_when_refused(run, run_dir, resume):
                fetch_model(run.config.model)
                refuse_small_disk(run.config, run.facts, run_dir)
                with Workers(run_dir, run.facts, run.config.launch, relay) as workers:
                    describe_machine(run_dir)
                    prepare_rows(run, run_dir, say)
                    sending.start()
                    ended = workers.wait()
        except UserError as refused:
            _tell_diagnosis(before, refused, say)
            raise
        except (KeyboardInterrupt, SystemExit) as stopped:
            code = int(stopped.code or 0) if isinstance(stopped, SystemExit) else 128 + signal.SIGINT
            _report(run_dir, "interrupted", STOPPED_EARLY, None, say)
            run_hook(run.config, run_dir, code, say)
            raise
        except Exception as error:
            _report(run_dir, "failed", str(error), _tell_diagnosis(before, error, say), say)
            run_hook(run.config, run_dir, 1, say)
            raise
        if ended.exit_code != 0 and not ended.told and not run_dir.report.exists():
            _report(run_dir, "interrupted", STOPPED_EARLY, None, say)
        return run_dir, _ended_with_hook(before, ended, sending, say, at_once=workers.at_once)


def start_detached(run: CheckedRun, say: Say, resume: Resume | None = None) -> RunDir:
    """Start a run that outlives this terminal; its data is prepared first, so that a bad row is told here."""
    with held(resume.run_dir) if resume is not None else nullcontext():
        run_dir = open_run(run, resume)
    with freed_when_refused(run, run_dir, resume):
        fetch_model(run.config.model)
        refuse_small_disk(run.config, run.facts, run_dir)
        prepare_rows(run, run_dir, say)
    writer = masked_file(run_dir.logs / "parent.log")
    assert writer.stdin is not None
    with writer.stdin as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune.training.supervise", str(run_dir.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    say(f"run       {run_dir.path}")
    say(f"detached  process {process.pid}; stop it with: kill {process.pid}")
    say(f"          follow it with: tail -f {run_dir.log(0)}")
    return run_dir


def found_to_resume(run: CheckedRun, say: Say) -> Resume | None:
    """The run that this one goes on with, looked at and told; None: a new one."""
    resume = to_resume(replace(run, config=brought_here(run.config, run.facts, say)))
    if resume is None:
        if run.config.checkpoint.resume != NEVER:
            say("resume    there is no such run yet: a new one begins")
        return None
    for line in resume_lines(resume):
        say(line)
    if resume.completed and run.config.checkpoint.remote is not None:
        _send_again(run, resume, say)
    elif not resume.completed:
        refuse_other_rows(run, resume)
    return resume


def _ended_with_hook(before: Before, ended: Ended, sending: Sending, say: Say, *, at_once: bool) -> Ended:
    """How the run ended, after all of it is off the machine, and then the user's command for it."""
    failure = _failure(before, ended, say)
    lost = sending.finish(ended.exit_code, at_once=at_once)
    code = ended.exit_code or (RUN_FAILED if lost else 0)
    if lost and ended.exit_code != 0:
        say(f"WARNING   {lost}")
    run_hook(before.config, before.run_dir, code, say)
    if failure is None and code != ended.exit_code:
        failure = RunFailed(lost, code)
    if failure is not None:
        raise failure
    return ended


def _failure(before: Before, ended: Ended, say: Say) -> RunFailed | None:
    if not ended.told:
        return None
    run_dir, found = before.run_dir, diagnose(before, ended)
    who = f"rank {ended.failed_rank} failed first" if ended.failed_rank is not None else "the run failed"
    # of what several ranks have reported the first failure stays
    _report(run_dir, "failed", ended.told, found.record if found is not None else None, say)
    why = "".join(f"{line}\n" for line in found.lines) if found is not None else ""
    message = f"\n{why}{who}; output of every rank: {run_dir.logs}\n{ended.told}"
    return RunFailed(message, ended.exit_code)


def _report(run_dir: RunDir, status: str, told: str, diagnosis: dict[str, Any] | None, say: Say) -> None:
    """Into report.json, where the disk takes it."""
    try:
        report_end(run_dir, status, told)
        report_diagnosis(run_dir, diagnosis, say)
    except OSError as error:
        say(f"WARNING   {run_dir.report} could not be written: {error.strerror}")


def _tell_diagnosis(before: Before, error: BaseException, say: Say) -> dict[str, Any] | None:
    """Tell why this very process failed, above its message; what goes into the report."""
    found = diagnose_error(before, error)
    for line in found.lines if found is not None else ():
        say(line)
    return found.record if found is not None else None


def _send_again(run: CheckedRun, resume: Resume, say: Say) -> None:
    """Bring off the machine what a completed run could not send."""
    with held(resume.run_dir), Sending(run.config, resume.run_dir, say) as sending:
        sending.start()
        lost = sending.finish(0)
    if lost:
        raise RunFailed(lost)


def _continue_detached(path: str) -> int:
    run_dir = RunDir(Path(path))
    before = look_before(run_dir)
    config, facts = before.config, before.facts
    rank = config.launch.machine_rank
    try:
        with held(run_dir, rank), Sending(config, run_dir, _to_log) as sending:
            with Workers(run_dir, facts, config.launch) as workers:
                describe_machine(run_dir)
                sending.start()
                ended = workers.wait()
            told = _ended_with_hook(before, ended, sending, _to_log, at_once=workers.at_once)
            return told.exit_code
    except FinetuneError as failed:
        sys.stderr.write(f"{failed}\n")
        return failed.exit_code


def _to_log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(_continue_detached(sys.argv[1]))
