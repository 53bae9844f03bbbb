"""One rank of a world that rehearses case after case: `python -m finetune.rehearse.every_worker CASES
RESULTS` under torchrun.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from finetune.config.saved import load_config
from finetune.config.schema import Method
from finetune.distributed.outer import outer_launch
from finetune.distributed.world import current_world
from finetune.doctor.check import PASS
from finetune.errors import Problem
from finetune.logs import set_up_logging
from finetune.model.source import find_source
from finetune.model.standalone import write_standalone
from finetune.model.target import find_target
from finetune.paths import RunDir
from finetune.rehearse.opened import opened
from finetune.rehearse.play import (
    MERGED_TO,
    StageFailed,
    last_words,
    logged_steps,
    refuse_apart,
    refuse_difference,
)
from finetune.report.card import card_of
from finetune.report.record import read_report
from finetune.training.checkpoint import damage, numbered, step_of
from finetune.training.join import open_together
from finetune.training.process import guarded
from finetune.training.worker import run

STEPS, CHECKPOINT_STEP = 4, 2


def main(cases: str, results: str) -> None:
    """Play every case; rank 0 writes how it went. A case that fails ends this world."""
    set_up_logging(main=current_world().is_main)
    for case in json.loads(Path(cases).read_text(encoding="utf-8")):
        start = time.monotonic()
        detail = play(case["recipe"], Path(case["recipe"]).stem)
        if current_world().is_main:
            seconds = round(time.monotonic() - start, 1)
            line = {"name": case["name"], "status": PASS, "seconds": seconds, "detail": detail}
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def play(recipe: str, name: str) -> str:
    """Train, go on from the first checkpoint, save, merge, open again, generate."""
    words = [f"recipe={recipe}", f"trainer.max_steps={STEPS}", f"checkpoint.every_steps={CHECKPOINT_STEP}"]
    straight = _train([*words, f"run_name={name}"])
    resumed = RunDir(straight.path.with_name(f"{name}-resumed"))
    if current_world().is_main:
        _as_if_killed(straight, resumed)
    _train([*words, f"run_name={resumed.path.name}", "checkpoint.resume=auto"])
    if not current_world().is_main:
        return ""
    refuse_difference(logged_steps(straight)[CHECKPOINT_STEP:], logged_steps(resumed))
    detail = _merged_and_opened(resumed, read_report(straight)["strategy"]["actual"])
    for run_dir in (straight, resumed):  # the room that is asked for is that of one case
        shutil.rmtree(run_dir.path, ignore_errors=True)  # the other rank may still close its log
    return detail


def _train(words: list[str]) -> RunDir:
    outer, world = outer_launch(), current_world()
    assert outer is not None
    with ExitStack() as lock:
        run_dir, _ = open_together(words, outer, lambda line: None, lock)
        told: list[str] = []
        code = guarded(run_dir, world.rank, run, told.append)
    if code != 0:
        said = last_words("".join(told))
        raise StageFailed(f"rank {world.rank}: the run ended with exit code {code}\n{said}")
    return run_dir


def _as_if_killed(whole: RunDir, killed: RunDir) -> None:
    """The folder as it was when only the first checkpoint was there."""
    shutil.copytree(whole.path, killed.path)
    shutil.rmtree(killed.model)
    killed.report.unlink()
    for folder in numbered(killed.checkpoints):
        if step_of(folder) > CHECKPOINT_STEP:
            shutil.rmtree(folder)
        elif wrong := damage(folder):
            raise StageFailed(f"{folder.name}: {wrong}")


def _merged_and_opened(run_dir: RunDir, strategy: str) -> str:
    problems: list[Problem] = []
    source = find_source(str(run_dir.path), [], problems)
    merged = run_dir.path.with_name(f"{run_dir.path.name}-merged")
    target = find_target(source, str(merged), MERGED_TO, problems)
    if source is None or target is None:
        raise StageFailed("; ".join(map(str, problems)))
    write_standalone(source, target, MERGED_TO, [], card_of(source, merged.name))
    config = load_config(run_dir.config)
    base = "" if config.adapter.method is Method.full else config.model.name_or_path
    told = opened(str(merged), str(run_dir.model), base)
    shutil.rmtree(merged)
    refuse_apart(told)
    if not told["tokens"]:
        raise StageFailed("the merged model answers nothing")
    return f"{told['architecture']} under {strategy}"


if __name__ == "__main__":
    main(*sys.argv[1:3])
