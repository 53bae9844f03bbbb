"""Does this machine bear the run that is meant: its plan, its strategy over these links, its checkpoints?"""

from __future__ import annotations

from collections.abc import Iterator

from finetune.config.schema import Method, RunConfig
from finetune.config.strategy import TRAITS
from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.errors import DoesNotFit
from finetune.hardware.links import verdict
from finetune.hardware.survey import MachineReport
from finetune.planner.plan import Plan
from finetune.training.start import CheckedRun

GB = 1e9
LONG_SAVE_SECONDS = 300.0
"""A checkpoint that is written longer than this is still being written when a cheap machine is taken away."""


def run_checks(run: CheckedRun, report: MachineReport) -> Iterator[Check]:
    """Everything about the run that needs no process of it."""
    yield _plan_check(run)
    if isinstance(run.plan, Plan):
        yield _room_check(run.config, run.plan, report)
        yield _save_time_check(run.plan, report)
    if len(report.cards) > 1 and run.facts.device == "cuda" and run.facts.num_processes > 1:
        yield _link_check(run, report)


def _plan_check(run: CheckedRun) -> Check:
    facts = run.facts
    shape = f"{facts.strategy.value} on {facts.num_processes} process{'es' * (facts.num_processes > 1)}"
    if isinstance(run.plan, str):
        return Check("plan", WARN, f"{shape}; whether it fits is not known: {run.plan}")
    try:
        run.refuse_unfit()
    except DoesNotFit as no:
        return Check("plan", FAIL, f"{shape}: {no.problems[0].why}", no.problems[0].fix)
    option = run.plan.chosen
    held = option.card_bytes if run.plan.machine.gpu is not None else option.host.upper
    whole = run.plan.machine.usable_bytes if run.plan.machine.gpu is not None else run.plan.machine.host_bytes
    where = "a card" if run.plan.machine.gpu is not None else "RAM"
    status = PASS if run.plan.fits else WARN
    return Check("plan", status, f"{shape}: up to {held / GB:,.1f} of {whole / GB:,.1f} GB {where}")


def _room_check(config: RunConfig, plan: Plan, report: MachineReport) -> Check:
    """What `checkpoint.keep` checkpoints, the one that is being written, and the model take."""
    disk, option = report.host.disk, plan.chosen
    saves = config.checkpoint.every_minutes is not None or config.checkpoint.every_steps is not None
    count = config.checkpoint.keep + 1 if saves else 1
    model = option.outside.download if config.adapter.method is Method.full else 0.0
    needed = count * option.outside.checkpoint + model
    told = f"{count} checkpoint{'s' * (count > 1)} of {_size(option.outside.checkpoint)} and the model"
    detail = f"{told}: {_size(needed)} of {_size(disk.free_bytes)} free in {disk.nearest}"
    if needed > disk.free_bytes:
        fix = "Free space, set output_dir to a larger disk, or keep fewer: checkpoint.keep=1."
        return Check("room", FAIL, detail, fix)
    return Check("room", PASS, detail)


def _save_time_check(plan: Plan, report: MachineReport) -> Check:
    speed, size = report.host.disk.write_bytes_s, plan.chosen.outside.checkpoint
    if not speed:
        return Check("save time", PASS, "not known: the disk was not measured")
    seconds = size / speed
    detail = f"a checkpoint of {_size(size)} is written in {seconds:,.1f} s, beside training"
    if seconds > LONG_SAVE_SECONDS:
        fix = "Set output_dir to a faster disk, or save less often (checkpoint.every_minutes)."
        return Check("save time", WARN, detail, fix)
    return Check("save time", PASS, detail)


def _link_check(run: CheckedRun, report: MachineReport) -> Check:
    names = [card.name for card in report.cards]
    told = verdict(report.links, names, shards_weights=TRAITS[run.facts.strategy].shards_weights)
    detail = f"for {run.facts.strategy.value}: {told.why}"
    if told.good:
        return Check("link", PASS, detail)
    fix = "Compare with finetune plan: ddp or zero2 where the model fits; or a machine with NVLink."
    return Check("link", WARN, detail, fix)


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
