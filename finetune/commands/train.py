"""`finetune train`: check, then run here, in the background, or inside the world that a launcher made."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from finetune.distributed.outer import outer_launch
from finetune.errors import UserError
from finetune.progress import tell
from finetune.report.record import read_report
from finetune.training.start import check_run, run_folder, to_resume
from finetune.words import Words


def main(words: Words) -> int:
    """Train; returns the exit code."""
    overrides = list(words.overrides)
    as_json = "--json" in words.flags
    say = _to_stderr if as_json else tell
    outer = outer_launch()
    if outer is not None:
        from finetune.training.join import join

        if words.flags & {"--dry-run", "--json"}:
            raise UserError(
                f"--dry-run and --json are answered by one process, and {outer.launcher} started this one.\n"
                "    Use them with python -m finetune."
            )
        join(overrides, outer, say)
    run = check_run(overrides)
    for line in run.lines:
        say(line)
    if "--dry-run" in words.flags:
        resume = to_resume(run)
        if resume is None or not resume.completed:
            run.refuse_unfit()
        where = resume.run_dir if resume is not None else run_folder(run)
        say(f"run       {where.path} (not started: --dry-run; the data is not looked at)")
        if as_json:
            print(json.dumps(asdict(run.facts)))
        return 0
    from finetune.training.supervise import (  # the data libraries: after the checks
        found_to_resume,
        start_and_wait,
        start_detached,
    )

    resume = found_to_resume(run, say)
    if resume is not None and resume.completed:
        if as_json:
            print(json.dumps({**read_report(resume.run_dir), "run_dir": str(resume.run_dir.path)}))
        return 0
    if run.config.launch.detach:
        start_detached(run, say, resume)
        return 0
    run_dir, ended = start_and_wait(run, say, relay=_to_stderr if as_json else None, resume=resume)
    if as_json:
        print(json.dumps({**read_report(run_dir), "run_dir": str(run_dir.path)}))
    return ended.exit_code


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
