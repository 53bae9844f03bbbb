"""Going on from a checkpoint: which one, whether the run is still the same, and a folder as it was then."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from finetune.config.facts import load_facts
from finetune.config.rules import RunFacts
from finetune.config.saved import load_config
from finetune.config.schema import RunConfig
from finetune.config.strategy import TRAITS, Engine
from finetune.errors import Problem, Refusal, refuse
from finetune.paths import RunDir
from finetune.training.checkpoint import NAME, Found, damage, newest_whole, step_of

HARMLESS = (
    *("checkpoint", "tracking", "launch", "run_name", "output_dir", "data.num_proc", "hooks"),
    *("trainer.logging", "trainer.eval", "trainer.per_device_eval_batch_size", "trainer.dataloader"),
    *("trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"),
    "trainer.global_batch_size",
)
"""Keys that may differ: what is learnt does not depend on them (the global batch itself is compared)."""

NEVER, AUTO = "never", "auto"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on."""

    run_dir: RunDir
    found: Found | None
    """None: the run was begun and has no checkpoint yet; it starts again."""
    completed: bool
    """It has made all its steps and its model is verified: there is nothing to do."""
    changed: tuple[str, ...]
    """Harmless differences to the run as it was."""


def find_resume(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> Resume | None:
    """What `checkpoint.resume` comes to; None: a new run. Everything in the way is told at once."""
    wanted = config.checkpoint.resume
    if wanted == NEVER:
        return None
    if wanted == AUTO:
        if not run_dir.config.exists():
            return None
        found = _newest(run_dir)
    else:
        run_dir, found = _named(Path(wanted).expanduser().absolute(), wanted)
    problems, harmless = compare(config, facts, run_dir)
    if problems:
        raise Refusal(problems, f"what is to be resumed ({run_dir.path})")
    return Resume(run_dir, found, _completed(run_dir, found), harmless)


def compare(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> tuple[list[Problem], tuple[str, ...]]:
    """Differences between a run as it was and as it is asked for: what matters, and what does not."""
    old_config, old_facts = load_config(run_dir.config), load_facts(run_dir.facts)
    old, new = dict(_leaves(old_config)), dict(_leaves(config))
    problems, harmless = [], []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after or key == "distributed.strategy":  # what it came to is compared below
            continue
        if key.startswith(HARMLESS):
            harmless.append(f"{key}: {before} -> {after}")
        elif not _allowed(key, config.checkpoint.allow_changes):
            why = f"the run was begun with {before}"
            fix = f"Take the old value, or allow it: checkpoint.allow_changes='[{key}]'."
            problems.append(Problem(f"{key}={after}", why, fix))
    for what, was, now in (
        ("global batch", old_facts.batch.global_size, facts.batch.global_size),
        ("precision", old_facts.precision, facts.precision),
    ):
        if was != now:
            problems.append(Problem(f"{what} {now}", f"the run was begun with {was}", "Take the old one."))
    was, now = _world(old_facts), _world(facts)
    if was != now and _elastic(old_facts) is not None and _elastic(old_facts) == _elastic(facts):
        harmless.append(f"{was} -> {now} (random numbers, which dropout alone uses, start anew)")
    elif was != now:
        fix = (
            "Take the old ones: only single and ddp, and fsdp on other numbers of processes, may take turns."
        )
        problems.append(Problem(now, f"the run was begun with {was}", fix))
    return problems, tuple(harmless)


def _world(facts: RunFacts) -> str:
    return f"{facts.strategy.value} on {facts.num_processes} process{'es' * (facts.num_processes > 1)}"


def _elastic(facts: RunFacts) -> str | None:
    """Runs of one kind read each other's checkpoints on any number of processes; None: they do not."""
    engine = TRAITS[facts.strategy].engine
    kinds = {Engine.none: "plain", Engine.ddp: "plain", Engine.fsdp2: facts.strategy.value}
    return kinds.get(engine)


def take_up(resume: Resume) -> None:
    """Bring the run's folder to where its checkpoint was made: nothing of what came later stays."""
    run_dir, step = resume.run_dir, resume.found.step if resume.found else 0
    if run_dir.metrics.exists():
        lines = run_dir.metrics.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _whole(line) and json.loads(line)["step"] <= step]
        run_dir.metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    for stale in (*run_dir.logs.glob("*.failed.json"), run_dir.report, run_dir.data):
        stale.unlink(missing_ok=True)
    for stale in (run_dir.unverified, run_dir.failed_model, run_dir.checkpoints / ".part"):
        shutil.rmtree(stale, ignore_errors=True)
    if resume.found is None:
        run_dir.resume.unlink(missing_ok=True)
        return
    beside = run_dir.resume.with_suffix(".part")
    beside.write_text(json.dumps({"checkpoint": str(resume.found.path), "step": step}), encoding="utf-8")
    beside.replace(run_dir.resume)


def resume_lines(resume: Resume) -> list[str]:
    """What is said about a resumed run."""
    lines = [f"resume    {resume.run_dir.path}"]
    if resume.found is not None:
        lines += [f"resume    passed over {skipped}" for skipped in resume.found.skipped]
        lines.append(f"resume    from step {resume.found.step}: {resume.found.path}")
    else:
        lines.append("resume    it has no checkpoint yet, and starts again")
    return [*lines, *(f"resume    differs, without harm: {what}" for what in resume.changed)]


def _newest(run_dir: RunDir) -> Found | None:
    found = newest_whole(run_dir.checkpoints)
    if isinstance(found, Found):
        return found
    if not found:
        return None
    problems = [Problem(name, "not whole") for name in found]
    raise Refusal(problems, f"{run_dir.checkpoints}: no checkpoint is whole")


def _named(path: Path, wanted: str) -> tuple[RunDir, Found]:
    """The checkpoint (or the run) that was named."""
    where = f"checkpoint.resume={wanted}"
    if (path / "config.yaml").exists():
        run_dir = RunDir(path)
        found = _newest(run_dir)
        if found is None:
            raise refuse(where, "this run has no checkpoint", subject="what is to be resumed")
        return run_dir, found
    if not NAME.fullmatch(path.name) or not path.is_dir():
        why = "it is neither a checkpoint (checkpoint-N) nor a run's folder"
        raise refuse(where, why, "Use never, auto, or such a path.", subject="what is to be resumed")
    wrong = damage(path)
    if wrong:
        raise refuse(
            where, wrong, "Use checkpoint.resume=auto to take the newest whole one.", subject=str(path)
        )
    return RunDir(path.parent.parent), Found(path, step_of(path))


def _completed(run_dir: RunDir, found: Found | None) -> bool:
    if found is None or not run_dir.report.exists() or not run_dir.model.exists():
        return False
    return bool(json.loads(run_dir.report.read_text(encoding="utf-8")).get("status") == "completed")


def _allowed(key: str, allowed: list[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from _leaves(getattr(value, entry.name), f"{key}.{entry.name}" if key else entry.name)
    elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{key}.{place}")
    else:
        yield key, value.value if isinstance(value, Enum) else value


def _whole(line: str) -> bool:
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False  # cut off when the machine went away
