"""Does this machine bear the run that is meant: its plan, what it sends over these links, its checkpoints?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from finetune.config.schema import Method, RunConfig
from finetune.config.strategy import TRAITS
from finetune.doctor.cards import matrix_text
from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.sizes import GB, gb_text
from finetune.errors import DoesNotFit
from finetune.hardware.links import verdict
from finetune.hardware.machine import LINKS, Machine
from finetune.hardware.survey import MachineReport
from finetune.planner.option import Option
from finetune.planner.plan import Plan
from finetune.planner.traffic import ACHIEVED, STAGED
from finetune.training.room import checkpoints_at_once
from finetune.training.start import CheckedRun

MOST_SENDING = 0.5
"""Of the time that a step computes: sending that takes longer can no longer hide behind it."""
LANE_BYTES_S = {3: 0.985 * GB, 4: 1.969 * GB, 5: 3.938 * GB}
"""Of one PCIe lane in one direction, by generation (PCI-SIG)."""
LONG_SAVE_SECONDS = 300.0
"""A checkpoint that is written longer than this is still being written when a cheap machine is taken away."""


def run_checks(run: CheckedRun, report: MachineReport) -> Iterator[Check]:
    """Everything about the run that needs no process of it."""
    yield _plan_check(run)
    if isinstance(run.plan, Plan):
        yield _room_check(run.config, run.plan, report)
        yield _save_time_check(run.plan, report)


def link_check(run: CheckedRun, report: MachineReport) -> Check | None:
    """The links, judged by what this run sends over them; None: it sends nothing from card to card."""
    if len(report.cards) < 2 or run.facts.device != "cuda" or run.facts.num_processes < 2:
        return None
    found = verdict(report.links, [card.name for card in report.cards])
    detail = f"for {run.facts.strategy.value}: {found.why}"
    traits, full = TRAITS[run.facts.strategy], run.config.adapter.method is Method.full
    slow = not found.fast and (traits.shards_weights or full or not report.links.slowest)
    if isinstance(run.plan, Plan) and report.links.slowest:
        option = run.plan.chosen
        rate = _way_bytes_s(report, run.plan.machine) * ACHIEVED * (STAGED if found.barred else 1.0)
        seconds, compute = option.traffic.between_cards / rate, option.time.compute
        detail += f"; by the plan each card sends {gb_text(option.traffic.between_cards)} a step, "
        detail += f"{seconds:.2g} s at best, beside {compute:.2g} s of computing"
        slow = seconds > MOST_SENDING * compute
    if not slow:
        return Check("links", PASS, detail + matrix_text(report))
    fix = "Compare with finetune plan: adapter=lora, or ddp or zero2 where the model fits; or rent NVLink."
    return Check("links", WARN, detail + matrix_text(report), fix)


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
    return Check("plan", status, f"{shape}: up to {gb_text(held)} of {gb_text(whole)} of {where}")


def _room_check(config: RunConfig, plan: Plan, report: MachineReport) -> Check:
    """What the checkpoints that lie there at once, and the model, take."""
    disk, option, count = report.host.disk, plan.chosen, checkpoints_at_once(config.checkpoint)
    model = option.outside.download if config.adapter.method is Method.full else 0.0
    needed = count * option.outside.checkpoint + model
    told = f"{count} checkpoints of {gb_text(option.outside.checkpoint)} and the model"
    detail = f"{told}: {gb_text(needed)} of {gb_text(disk.free_bytes)} free in {disk.nearest}"
    if needed > disk.free_bytes:
        return Check(
            "room", FAIL, detail, _more_room(config.checkpoint.keep, needed - disk.free_bytes, option)
        )
    return Check("room", PASS, detail)


def _more_room(keep: int, lacking: float, option: Option) -> str:
    """What to do about it; to keep fewer checkpoints only where that is enough."""
    fewer = keep - math.ceil(lacking / option.outside.checkpoint) if option.outside.checkpoint else 0
    ways = "Free space, or set output_dir to a larger disk"
    return f"{ways}; or keep fewer: checkpoint.keep={fewer}." if fewer >= 1 else f"{ways}."


def _save_time_check(plan: Plan, report: MachineReport) -> Check:
    speed, size = report.host.disk.write_bytes_s, plan.chosen.outside.checkpoint
    if not speed:
        return Check("save time", WARN, "not known: the disk was not measured")
    seconds = size / speed
    detail = f"a checkpoint of {gb_text(size)} is written in {seconds:,.1f} s, beside training"
    if seconds > LONG_SAVE_SECONDS:
        fix = "Set output_dir to a faster disk, or save less often (checkpoint.every_minutes)."
        return Check("save time", WARN, detail, fix)
    return Check("save time", PASS, detail)


def _way_bytes_s(report: MachineReport, machine: Machine) -> float:
    """Of the slowest way between two cards: NVLink by the catalogue, PCIe as the cards tell it."""
    if report.links.slowest.startswith("NV"):
        return machine.link_bytes_s
    pairs = [(card.pcie_generation_host, card.pcie_width_now) for card in report.cards]
    told = [LANE_BYTES_S[made] * lanes for made, lanes in pairs if made in LANE_BYTES_S and lanes]
    if told:
        return min(told)
    return machine.link_bytes_s if machine.link.startswith("pcie") else (LINKS["pcie4"] or 0.0) * GB
