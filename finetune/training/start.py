"""The first part of a run: compose, check, open its folder. In under two seconds, without torch.

`python -m finetune` does it before it starts the workers; under a launcher that is not ours rank 0 does it
while the other ranks wait.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from threading import Thread
from typing import Any

from finetune.config.compose import Composed, compose, save_config
from finetune.config.facts import save_facts
from finetune.config.rules import RunFacts, resolve
from finetune.config.schema import Device, RunConfig, Strategy
from finetune.distributed.accelerate import launch_file, write_launch_file
from finetune.distributed.outer import (
    OuterLaunch,
    fsdp1_problem,
    parent_command,
    precision_problems,
    strategy_problems,
)
from finetune.errors import Problem, Refusal, refuse
from finetune.hardware.probe import probe_devices
from finetune.hardware.survey import probe_machine
from finetune.paths import PACKAGE, RunDir
from finetune.planner.plan import Plan
from finetune.planner.record import as_record
from finetune.remote.address import place_of_resume
from finetune.training.planned import plan_run, refuse_unfit, settled, told_lines
from finetune.training.remote_run import refuse_silent_store, refuse_taken_name
from finetune.training.resume import AUTO, Resume, find_resume, take_up
from finetune.version import __version__


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A config that has passed every check, and what it means on this machine."""

    config: RunConfig
    """With what the plan chose where it said `auto`; the strategy is in `facts`."""
    facts: RunFacts
    composed: Composed
    plan: Plan | str
    """A text: why there is none."""

    @property
    def lines(self) -> list[str]:
        """What is told of it before it starts."""
        if isinstance(self.plan, str):
            forecast = [f"plan      none: {self.plan}"]
        else:
            asked = replace(self.composed.config, distributed=self.config.distributed)
            forecast = told_lines(self.plan, asked)
        return [*self.composed.notes, *self.facts.lines, *forecast]

    def refuse_unfit(self) -> None:
        """Nothing is made of a run that does not fit (`DoesNotFit`)."""
        if not isinstance(self.plan, str):
            refuse_unfit(self.config, self.plan, self.composed.subject)


CARDS = ("gpu", "num_gpus", "name", "memory_mib", "reserved_mib", "capability", "bf16", "matmul_tflops")
"""Keys of `hardware` that describe other cards than those of this machine."""


def check_run(overrides: list[str], outer: OuterLaunch | None = None) -> CheckedRun:
    """Compose and check; every problem of the config, the machine and an outer launcher in one refusal."""
    problems: list[Problem] = []
    composed = compose(overrides, problems=problems)
    config = composed.config
    if config.run_name is not None and Path(config.run_name).name != config.run_name:
        problems.append(
            Problem(
                f"run_name={config.run_name}",
                "it names one folder inside output_dir.",
                "Leave out the slash.",
            )
        )
    cards = next((key for key in CARDS if getattr(config.hardware, key) is not None), None)
    if cards is not None:
        name = "hardware" if cards == "gpu" else f"hardware.{cards}"
        why = "a run takes place on this machine; another one can be planned for (`finetune plan`)"
        problems.append(Problem(f"{name}={getattr(config.hardware, cards)}", why, "Leave the key out."))
    config = _named_by_its_address(config, problems)
    if outer is not None:
        config = _join(config, outer, problems)
    given, subject = composed.provenance, composed.subject
    world = None if outer is None else outer.num_processes
    plan = "" if problems else plan_run(config, given, subject, outer)
    if isinstance(plan, str):
        facts = resolve(
            config, devices=probe_devices(), world=world, given=given, problems=problems, subject=subject
        )
    else:
        config, facts = settled(config, plan)
    wrong = precision_problems(facts.precision)
    if outer is not None:
        wrong += strategy_problems(outer, facts.strategy)
        facts = replace(facts, notes=(*facts.notes, f"started by {outer.launcher}", *outer.notes))
    if wrong:
        raise Refusal(wrong, subject)
    if config.launch.machine_rank == 0:
        refuse_silent_store(config.checkpoint, subject)
    return CheckedRun(config, facts, composed, plan)


def run_folder(run: CheckedRun) -> RunDir:
    """Where the run would be; an old run's folder is refused, unless it is to be resumed."""
    run_dir = RunDir(Path(run.config.output_dir).absolute() / (run.config.run_name or _new_name(run)))
    if run_dir.path.exists() and run.config.launch.machine_rank == 0:
        raise _taken(run, run_dir)
    if run.config.launch.machine_rank == 0:
        refuse_taken_name(run.config.checkpoint, run_dir.path.name, run.composed.subject)
    return run_dir


def to_resume(run: CheckedRun) -> Resume | None:
    """The run of this machine that this one goes on with; None: a new one, or one that is elsewhere."""
    if run.config.checkpoint.resume == AUTO and run.config.run_name is None:
        why = "nothing says which run is meant"
        raise refuse("checkpoint.resume=auto", why, "Set run_name.", subject=run.composed.subject)
    run_dir = RunDir(Path(run.config.output_dir).absolute() / (run.config.run_name or ""))
    config = run.config
    if place_of_resume(config.checkpoint.resume, config.checkpoint.remote) is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, resume=AUTO))
    return find_resume(config, run.facts, run_dir)


def open_run(run: CheckedRun, resume: Resume | None = None) -> RunDir:
    """Make the run's folder, or take up an old one, and write what every process of the run will read.

    Raises:
        DoesNotFit: the plan's upper bound is more than the machine has.
        Refusal: the folder cannot be made, or belongs to another run.
    """
    run.refuse_unfit()
    if resume is not None:
        take_up(resume)
        _write(run, resume.run_dir)
        return resume.run_dir
    run_dir = run_folder(run)
    if run.config.launch.machine_rank > 0:
        return _opened_by_machine_0(run_dir)
    # written beside its place: a kill leaves no folder that can neither be begun nor gone on with
    beside = RunDir(run_dir.path.with_name(f".{run_dir.path.name}.{os.getpid()}.part"))
    try:
        for folder in (beside.logs, beside.checkpoints):
            folder.mkdir(parents=True)
        _write(run, beside)
        beside.path.rename(run_dir.path)
    except BaseException as error:
        shutil.rmtree(beside.path, ignore_errors=True)
        if isinstance(error, OSError) and run_dir.path.exists():
            raise _taken(run, run_dir) from None
        if isinstance(error, OSError):
            where, why = (
                f"output_dir={run.config.output_dir}",
                f"nothing can be written there: {error.strerror}",
            )
            raise refuse(where, why, "Choose another folder.", subject=run.composed.subject) from error
        raise
    return run_dir


def describe_machine(run_dir: RunDir) -> None:
    """Add the machine to environment.json beside the run: nvidia-smi takes seconds, a hanging one minutes."""

    def describe() -> None:
        machine = asdict(probe_machine(run_dir.path.parent, measure_disk=False))
        # in place, and nothing new: the folder of a run that is refused meanwhile goes
        with suppress(OSError), run_dir.environment.open("r+", encoding="utf-8") as file:
            content = {**json.load(file), "machine": machine}
            file.seek(0)
            file.write(json.dumps(content, indent=2) + "\n")

    Thread(target=describe, name="machine", daemon=True).start()


def _write(run: CheckedRun, run_dir: RunDir) -> None:
    save_config(run.config, run_dir.config)
    save_facts(run.facts, run_dir.facts)
    run_dir.plan.unlink(missing_ok=True)
    if not isinstance(run.plan, str):
        record = json.dumps(as_record(run.plan, run.composed.config), indent=2)
        run_dir.plan.write_text(f"{record}\n", encoding="utf-8")
    write_launch_file(run_dir.accelerate, launch_file(run.facts, run.config.launch, run.config.distributed))
    run_dir.environment.write_text(json.dumps(_environment(run.composed), indent=2) + "\n", encoding="utf-8")


def _taken(run: CheckedRun, run_dir: RunDir) -> Refusal:
    return refuse(
        f"run_name={run_dir.path.name}",
        f"{run_dir.path} is there already, and a run never writes into another one's folder.",
        "Choose another run_name, or remove the folder.",
        subject=run.composed.subject,
    )


def _opened_by_machine_0(run_dir: RunDir) -> RunDir:
    """Wait for the folder on the storage that all machines share."""
    while not run_dir.environment.exists():
        time.sleep(0.2)
    return run_dir


def _named_by_its_address(config: RunConfig, problems: list[Problem]) -> RunConfig:
    """A run that is gone on with from a store has its name there."""
    place = place_of_resume(config.checkpoint.resume, config.checkpoint.remote)
    if place is None or config.run_name == place.run_name:
        return config
    if config.run_name is not None:
        why = f"{config.checkpoint.resume} belongs to the run {place.run_name}"
        problems.append(Problem(f"run_name={config.run_name}", why, "Leave run_name out."))
    return replace(config, run_name=place.run_name)


def _join(config: RunConfig, outer: OuterLaunch, problems: list[Problem]) -> RunConfig:
    """Take over what only the outer launcher can know; `auto` becomes the strategy it was configured for."""
    if config.launch.detach:
        problems.append(
            Problem("launch.detach=true", f"{outer.launcher} owns these processes.", "Leave the key out.")
        )
    problems += outer.problems
    demanded = fsdp1_problem(parent_command())
    if demanded is not None:
        problems.append(demanded)
    if config.distributed.strategy is Strategy.auto and outer.strategy is not None:
        config = replace(config, distributed=replace(config.distributed, strategy=outer.strategy))
    if outer.on_cpu and config.launch.device is Device.auto:
        config = replace(config, launch=replace(config.launch, device=Device.cpu))
    return config


def _new_name(run: CheckedRun) -> str:
    """Recipe or model, strategy, time, and a few letters: two runs of the same second differ."""
    choices = run.composed.choices
    what = choices["recipe"] or choices["model"] or Path(run.config.model.name_or_path).name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(what).stem if what.endswith(".yaml") else what)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{stem}-{run.facts.strategy.value}-{stamp}-{secrets.token_hex(2)}"


def _environment(composed: Composed) -> dict[str, Any]:
    """Who set what, versions, devices and git revision, for the record; `describe_machine` adds the rest."""
    names = (
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "deepspeed",
        "bitsandbytes",
        "datasets",
        "hydra-core",
    )
    versions = {d.name: d.version for d in distributions() if d.name in names}
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=PACKAGE
    )
    return {
        "finetune": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "devices": asdict(probe_devices()),
        "machine": None,
        "git_revision": revision.stdout.strip() or None,
        "composed": {"choices": composed.choices, "provenance": composed.provenance},
    }
