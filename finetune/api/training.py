"""Train from Python: in processes of its own, or inside the world that a launcher made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from finetune.api.live_chart import LiveChart
from finetune.api.run import Run
from finetune.distributed.outer import OuterLaunch, outer_launch
from finetune.errors import RunFailed
from finetune.paths import RunDir
from finetune.progress import tell
from finetune.training.checkpoint import numbered
from finetune.training.start import check_run

Say = Callable[[str], None]
NAMING = ("run_name=", "checkpoint.resume=")
"""What a stopped run is gone on with stands for these."""


def train(*overrides: str, say: Say = tell) -> Run:
    """Train as `python -m finetune` does: in processes of its own, or, inside torchrun's world, joining that.

    In a notebook the losses are drawn below the cell while it goes on. Interrupting the cell, as Ctrl-C and
    SIGTERM do a script, has a checkpoint saved and ends every process.

    Raises:
        Refusal: the config, the data or the machine must be changed first.
        RunFailed: the run had started and failed, or was stopped.
    """
    outer = outer_launch()
    run_dir, code = _train_here(overrides, say) if outer is None else _join(overrides, outer, say)
    if code > 128:
        raise RunFailed(_how_to_go_on(run_dir, overrides), code)
    if code != 0:
        raise RunFailed(f"the run did not end well; its folder: {run_dir.path}", code)
    return Run(run_dir.path)


def _train_here(overrides: tuple[str, ...], say: Say) -> tuple[RunDir, int]:
    """The run's folder and its exit code."""
    from finetune.training.supervise import found_to_resume, start_and_wait

    run = check_run(list(overrides))
    for line in run.lines:
        say(line)
    resume = found_to_resume(run, say)
    if resume is not None and resume.completed:
        return resume.run_dir, 0
    with LiveChart() as chart:
        try:
            run_dir, end = start_and_wait(run, say, relay=say, resume=resume, opened=chart.watch)
        except SystemExit as stopped:  # a signal, before there was anything to save
            if chart.run_dir is None:
                raise
            return chart.run_dir, int(stopped.code or 0)
    return run_dir, end.exit_code


def _join(overrides: tuple[str, ...], outer: OuterLaunch, say: Say) -> tuple[RunDir, int]:
    from finetune.distributed.world import current_world
    from finetune.logs import set_up_logging
    from finetune.training.diagnosis import look_before
    from finetune.training.join import open_together, run_to_its_end
    from finetune.training.process import guarded
    from finetune.training.worker import run as run_worker

    world = current_world()
    main = world.is_main
    set_up_logging(main=main)
    with ExitStack() as lock:
        run_dir, completed = open_together(list(overrides), outer, say, lock)
        if completed:
            return run_dir, 0
        work = partial(guarded, run_dir, world.rank, run_worker)
        return run_dir, run_to_its_end(look_before(run_dir), work, say) if main else work()


def _how_to_go_on(run_dir: RunDir, overrides: tuple[str, ...]) -> str:
    stopped = f"the run was stopped; its folder: {run_dir.path}"
    saved = numbered(run_dir.checkpoints)
    if not saved:
        return f"{stopped}\n    No checkpoint of it was saved."
    words = [word for word in overrides if not word.startswith(NAMING)]
    words += [f"run_name={run_dir.path.name}", "checkpoint.resume=auto"]
    called = ", ".join(f'"{word}"' if '"' not in word else repr(word) for word in words)
    return f"{stopped}\n    It saved {saved[-1].name}. Go on with it: finetune.train({called})"
