"""Going on from a checkpoint: which one, whether the run is still the same, and a folder as it was then."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from finetune.config.facts import load_facts
from finetune.config.rules import RunFacts
from finetune.config.saved import load_config
from finetune.config.schema import RunConfig
from finetune.config.suggest import nearest
from finetune.errors import Problem, Refusal, refuse
from finetune.paths import RunDir, write_whole
from finetune.report.record import read_report
from finetune.training.checkpoint import (
    NAME,
    PART,
    Found,
    damage,
    newest_whole,
    numbered,
    read_manifest,
    set_aside,
    step_of,
)

HARMLESS = (
    *(
        "checkpoint",
        "tracking",
        "launch",
        "run_name",
        "output_dir",
        "data.num_proc",
        "data.eval_samples",
        "hooks",
    ),
    *("hardware", "plan"),
    *("trainer.logging", "trainer.eval", "trainer.per_device_eval_batch_size", "trainer.dataloader"),
    *("trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"),
    *("trainer.activation_checkpointing", "model.shape"),
    "trainer.global_batch_size",
)
"""Keys that may differ: what is learnt does not depend on them (the global batch itself is compared)."""

IN_THE_OPTIMIZER = tuple(
    f"trainer.{name}"
    for name in ("learning_rate", "weight_decay", "adam_", "optim", "lr_scheduler", "warmup")
)
"""Keys whose old values come back with the checkpoint, whatever is asked for."""

IN_THE_WEIGHTS = (
    *("adapter.method", "adapter.r", "adapter.target_modules", "adapter.modules_to_save", "adapter.experts"),
    *("adapter.use_dora", "adapter.bits", "adapter.quant_type"),
)
"""Keys that say which weights there are, and what they are added to."""

SUBJECT = "what is to be resumed"
NEVER, AUTO = "never", "auto"


@dataclass(slots=True)
class Differences:
    """What a run is asked for now, held against what it was."""

    problems: list[Problem] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    """Those that matter and were named in `checkpoint.allow_changes`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on."""

    run_dir: RunDir
    found: Found | None
    """None: the run was begun and has no checkpoint yet; it starts again."""
    completed: bool
    """It has made all its steps and its model is verified: there is nothing to do."""
    differences: Differences
    seen: tuple[str, ...]
    """What the folder held when it was looked at."""


def find_resume(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> Resume | None:
    """What `checkpoint.resume` comes to; None: a new run. Everything in the way is told at once."""
    wanted = config.checkpoint.resume
    if wanted == NEVER:
        return None
    if config.launch.num_machines > 1:
        why = "going on with a run on several machines is not built yet"
        raise refuse(f"checkpoint.resume={wanted}", why, subject=SUBJECT)
    found = None
    if wanted != AUTO:
        run_dir, found = _named(Path(wanted).expanduser().absolute(), wanted)
        if config.run_name not in (None, run_dir.path.name):
            why = f"{wanted} belongs to the run {run_dir.path.name}, which goes on in its own folder"
            raise refuse(f"run_name={config.run_name}", why, "Leave run_name out.", subject=SUBJECT)
    elif not run_dir.config.exists():
        return None
    differences = compare(config, facts, run_dir)
    if differences.problems:
        raise Refusal(differences.problems, f"{SUBJECT} ({run_dir.path})")
    done = _completed(run_dir)
    if done and found is None and not differences.allowed:
        return Resume(run_dir, None, True, differences, contents(run_dir))
    found = found or _newest(run_dir)
    if found is not None and config.checkpoint.best is not None:
        _refuse_lost_best(run_dir, found)
    if done and found is None:
        why = "it is completed and holds no checkpoint any more"
        raise refuse(str(run_dir.path), why, "Start a new run.", subject=SUBJECT)
    return Resume(run_dir, found, False, differences, contents(run_dir))


def compare(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> Differences:
    """Hold a run as it is asked for against what it was."""
    try:
        old_config, old_facts = load_config(run_dir.config), load_facts(run_dir.facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"its config.yaml and facts.json cannot be read: {error}"
        raise refuse(str(run_dir.path), why, subject=SUBJECT) from error
    old, new = dict(_leaves(old_config)), dict(_leaves(config))
    found = Differences()
    for name in config.checkpoint.allow_changes:
        if not any(_allowed(key, [name]) for key in {*old, *new}):
            near = nearest(name, [*old, *new])
            fix = f"Did you mean {near}?" if near else "Name keys, such as trainer.max_steps or data."
            found.problems.append(Problem(f"checkpoint.allow_changes={name}", "there is no such key", fix))
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after or key == "distributed.strategy":  # what it came to is compared below
            continue
        if key.startswith(HARMLESS):
            found.harmless.append(f"{key}: {before} -> {after}")
        elif key.startswith(IN_THE_OPTIMIZER):
            why = f"the run was begun with {before}, which the saved optimizer and schedule hold"
            fix = "Take the old value, or start a new run from what was learnt (adapter.init_from)."
            found.problems.append(Problem(f"{key}={after}", why, fix))
        elif key in IN_THE_WEIGHTS:
            why = f"the run was begun with {before}, and the saved weights are of that kind"
            fix = "Take the old value, or start a new run."
            found.problems.append(Problem(f"{key}={after}", why, fix))
        elif _allowed(key, config.checkpoint.allow_changes):
            found.allowed.append(f"{key}: {before} -> {after}")
        else:
            why = f"the run was begun with {before}"
            fix = f"Take the old value, or allow it: checkpoint.allow_changes='[{key}]'."
            found.problems.append(Problem(f"{key}={after}", why, fix))
    for what, was, now in (
        ("global batch", old_facts.batch.global_size, facts.batch.global_size),
        ("precision", old_facts.precision, facts.precision),
    ):
        if was != now:
            why = f"the run was begun with {was}"
            found.problems.append(Problem(f"{what} {now}", why, "Take the old one."))
    was, now = _world(old_facts), _world(facts)
    if was != now:
        found.harmless.append(f"{was} -> {now} (random numbers, which dropout alone uses, start anew)")
    return found


def _world(facts: RunFacts) -> str:
    return f"{facts.strategy.value} on {facts.num_processes} process{'es' * (facts.num_processes > 1)}"


def contents(run_dir: RunDir) -> tuple[str, ...]:
    """What another process at work in a run's folder changes."""
    ended = [path.name for path in (run_dir.model, run_dir.report) if path.exists()]
    return (*(folder.name for folder in numbered(run_dir.checkpoints)), *ended)


def take_up(resume: Resume) -> None:
    """Bring the run's folder to where its checkpoint was made: nothing of what came later stays.

    Whoever calls it holds the folder.
    """
    if contents(resume.run_dir) != resume.seen:
        why = "another process has been at work in it since it was looked at"
        raise refuse(str(resume.run_dir.path), why, "Try again.", subject=SUBJECT)
    run_dir, step = resume.run_dir, resume.found.step if resume.found else 0
    if run_dir.metrics.exists() and resume.found is None:
        run_dir.metrics.rename(run_dir.path / "metrics-without-checkpoint.jsonl")
    elif run_dir.metrics.exists():
        lines = run_dir.metrics.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if (made := _step(line)) is not None and made <= step]
        write_whole(run_dir.metrics, "".join(f"{line}\n" for line in kept))
    for folder in numbered(run_dir.checkpoints):
        at = step_of(folder)
        if at > step or (at < step and damage(folder)):  # the one at `step` was found whole just now
            set_aside(folder)
    for stale in (*run_dir.logs.glob("*.failed.json"), run_dir.report, run_dir.data):
        stale.unlink(missing_ok=True)
    for old in (run_dir.model, run_dir.failed_model):
        if old.exists():
            old.rename(old.with_name(f"{old.name}-step-{step}-{time.time_ns()}"))
    for stale in (run_dir.unverified, run_dir.checkpoints / PART):
        shutil.rmtree(stale, ignore_errors=True)
    if resume.found is None:
        run_dir.resume.unlink(missing_ok=True)
        return
    write_whole(run_dir.resume, json.dumps({"checkpoint": str(resume.found.path), "step": step}))


def resume_lines(resume: Resume) -> list[str]:
    """What is said about a resumed run."""
    lines = [f"resume    {resume.run_dir.path}"]
    if resume.completed:
        return [*lines, f"done      it is completed, there is nothing to do: {resume.run_dir.model}"]
    if resume.found is not None:
        lines += [f"resume    passed over {skipped}" for skipped in resume.found.skipped]
        lines.append(f"resume    from step {resume.found.step}: {resume.found.path}")
    else:
        lines.append("resume    it has no checkpoint yet, and starts again")
    lines += [f"resume    differs, without harm: {what}" for what in resume.differences.harmless]
    return [*lines, *(f"resume    differs, as allowed: {what}" for what in resume.differences.allowed)]


def _newest(run_dir: RunDir) -> Found | None:
    found = newest_whole(run_dir.checkpoints)
    if isinstance(found, Found):
        return found
    if not found:
        return None
    fix = "Restore one, or begin anew under another run_name."
    told = [line.partition(": ") for line in found]
    problems = [Problem(name, wrong, fix if name == told[-1][0] else "") for name, _, wrong in told]
    raise Refusal(problems, f"{run_dir.checkpoints}: no checkpoint is whole")


def _refuse_lost_best(run_dir: RunDir, found: Found) -> None:
    """The best checkpoint so far must be there: a run that goes on may find no better one."""
    best = read_manifest(found.path).get("best")
    if best is None or best["step"] == found.step:
        return
    folder = run_dir.checkpoints / f"checkpoint-{best['step']}"
    wrong = damage(folder) if folder.is_dir() else "it is not there"
    if wrong:
        fix = "Restore it, or go on without a best one: checkpoint.best=null."
        raise refuse(str(folder), f"the best one so far: {wrong}", fix, subject=SUBJECT)


def _named(path: Path, wanted: str) -> tuple[RunDir, Found]:
    """The checkpoint (or the run) that was named."""
    where = f"checkpoint.resume={wanted}"
    if (path / "config.yaml").exists():
        run_dir = RunDir(path)
        found = _newest(run_dir)
        if found is None:
            raise refuse(where, "this run has no checkpoint", subject=SUBJECT)
        return run_dir, found
    if NAME.fullmatch(path.name) and path.parent.is_dir() and not path.is_dir():
        there = ", ".join(folder.name for folder in numbered(path.parent)) or "none"
        raise refuse(where, f"it is not there; there are: {there}", subject=SUBJECT)
    if not NAME.fullmatch(path.name) or not path.is_dir():
        why = "it is neither a checkpoint (checkpoint-N) nor a run's folder"
        raise refuse(where, why, "Use never, auto, or such a path.", subject=SUBJECT)
    wrong = damage(path)
    if wrong:
        raise refuse(
            where, wrong, "Use checkpoint.resume=auto to take the newest whole one.", subject=str(path)
        )
    return RunDir(path.parent.parent), Found(path, step_of(path))


def _completed(run_dir: RunDir) -> bool:
    if not run_dir.report.exists() or not run_dir.model.exists():
        return False
    try:
        return bool(read_report(run_dir).get("status") == "completed")
    except ValueError:
        return False


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


def _step(line: str) -> int | None:
    """The step of a line of metrics; None for one that was cut off when the machine went away."""
    try:
        step: int | None = json.loads(line).get("step")
    except ValueError:
        return None
    return step
