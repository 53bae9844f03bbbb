"""From the words of a command line to a plan: the machine that is meant, sizes, choice, advice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune.config.compose import Composed, compose
from finetune.config.ranges import out_of_range
from finetune.config.schema import Device, RunConfig
from finetune.errors import Problem, Refusal, UserError
from finetune.hardware.machine import catalogue, machine_of
from finetune.planner.advice import advise
from finetune.planner.plan import Plan, make_plan
from finetune.planner.read_shape import read_shape
from finetune.planner.shape import Shape

LADDER = (
    *((1, card) for card in ("rtx4090", "l40s", "a100_80gb", "h200")),
    *((2, card) for card in ("a100_80gb", "h200")),
    *((4, card) for card in ("a100_80gb", "h200")),
    *((8, card) for card in ("a100_80gb", "h200", "b200")),
)
"""Machines that are usually rented, the cheapest first: tried in turn where there is no card here."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the config that it is for."""

    config: RunConfig
    plan: Plan
    composed: Composed


def answer(overrides: list[str]) -> list[Planned]:
    """One plan, or one for each machine of `hardware=[a,b,c]`."""
    machines = [word for word in overrides if word.startswith("hardware=[")]
    if not machines:
        return [_answer_one(overrides)]
    if not machines[-1].endswith("]"):
        raise UserError(f"{machines[-1]}: the list has no end, e.g. hardware=[1x_h200,4x_rtx4090]")
    rest = [word for word in overrides if word not in machines]
    names = [name.strip() for name in machines[-1].removeprefix("hardware=[").removesuffix("]").split(",")]
    if not all(names):
        raise UserError(
            f"{machines[-1]}: expected names of conf/hardware, e.g. hardware=[1x_h200,4x_rtx4090]"
        )
    return [_answer_one([*rest, f"hardware={name}"]) for name in names]


def _answer_one(overrides: list[str]) -> Planned:
    problems: list[Problem] = []
    composed = compose(overrides, problems=problems)
    config = composed.config
    if config.hardware.gpu is not None and config.launch.device is Device.cpu:
        why = f"the run computes on the CPU, and hardware={config.hardware.gpu} is a card"
        problems.append(Problem("launch.device=cpu", why, "Leave one of them out."))
    problems += out_of_range(config)
    if problems:
        raise Refusal(problems, composed.subject)
    shape = read_shape(config.model, composed.subject)
    given, subject = composed.provenance, composed.subject
    machine = machine_of(config.hardware, config.launch.num_machines, config.launch.device)
    wants_card = config.launch.device is Device.cuda or not config.model.cpu
    if machine.gpu is None and config.launch.device is not Device.cpu and wants_card:
        plan = _on_the_ladder(config, shape, given, subject)
    else:
        plan = make_plan(config, machine, shape, given, subject)
    if not plan.fits:
        plan = replace(plan, advice=advise(config, plan.machine, shape, given))
    return Planned(config, plan, composed)


def _on_the_ladder(config: RunConfig, shape: Shape, given: dict[str, str], subject: str) -> Plan:
    """No card is here: the first machine of the ladder that the run fits on, or its last."""
    plan = None
    processes = config.launch.num_processes or 1
    for count, card in LADDER:
        if count * max(config.launch.num_machines, 1) < min(processes, 8):
            continue
        wanted = replace(catalogue()[card], num_gpus=count, price_per_hour=config.hardware.price_per_hour)
        plan = make_plan(config, machine_of(wanted, config.launch.num_machines), shape, given, subject)
        if plan.fits and (not plan.chosen.offloads or config.distributed.strategy is plan.chosen.strategy):
            break
    assert plan is not None
    fits = "the smallest of the usual machines that it fits on" if plan.fits else "the largest that is tried"
    note = f"no GPU is here: planned for {plan.machine.label}, {fits} (hardware=NAME names another)"
    return replace(plan, notes=(*plan.notes, note))
