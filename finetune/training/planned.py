"""The plan of a run: made before anything starts, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig, Strategy
from finetune.config.trainer_fields import AUTO, OR_AUTO
from finetune.distributed.outer import OuterLaunch
from finetune.errors import DoesNotFit, Problem
from finetune.hardware.machine import UnknownCard, machine_of
from finetune.planner.advice import advise
from finetune.planner.memory import Bound
from finetune.planner.plan import Plan, make_plan, with_strategy
from finetune.planner.read_shape import UnknownSizes, read_shape


def plan_run(
    config: RunConfig, given: Mapping[str, str], subject: str, outer: OuterLaunch | None
) -> Plan | str:
    """The plan on this machine, or why there can be none.

    Raises:
        Refusal: no strategy, or not the one that is asked for, takes this config; or `auto` needs a plan.
    """
    machines = config.launch.num_machines if outer is None else outer.num_machines
    world = None if outer is None else outer.num_processes
    try:
        shape = read_shape(config.model, subject)
        machine = machine_of(config.hardware, machines, config.launch.device)
    except (UnknownSizes, UnknownCard) as unknown:
        if any(getattr(config.trainer, name) == AUTO for name in OR_AUTO):
            raise
        return unknown.problems[0].why
    plan = make_plan(config, machine, shape, given, subject, world)
    return plan if plan.fits else replace(plan, advice=advise(config, machine, shape, given, world))


def refuse_unfit(config: RunConfig, plan: Plan, subject: str) -> None:
    """Refuse a run that does not fit by the forecast's upper bound, unless `plan.enforce` is false.

    Raises:
        DoesNotFit: what is lacking, and what would fit.
    """
    if plan.fits or not config.plan.enforce:
        return
    where = f"distributed={config.distributed.strategy.value}"
    ways = ["What would fit:", *(f"  {line}" for line in plan.advice)] if plan.advice else []
    fix = "\n      ".join([*ways, "plan.enforce=false starts it all the same."])
    raise DoesNotFit([Problem(where, lacking(plan), fix)], subject)


def settled(config: RunConfig, plan: Plan) -> tuple[RunConfig, RunFacts]:
    """The config and the facts with what the plan chose where they say `auto`."""
    asked = config.distributed.strategy
    facts = replace(plan.chosen.facts, requested_strategy=asked)
    return with_strategy(plan.chosen.config, asked), facts


def told_lines(plan: Plan, config: RunConfig) -> list[str]:
    """What the terminal shows of it when a run starts; `config` as it was asked for."""
    option, machine = plan.chosen, plan.machine
    held, where = Bound(option.memory.allocated.expected, option.card_bytes), "a card"
    whole = machine.usable_bytes
    if machine.gpu is None:
        held, where, whole = option.host, "RAM", machine.host_bytes
    needed = f"{held.expected / 1e9:,.1f} to {held.upper / 1e9:,.1f} of {_gb(whole)} {where}"
    speed = f"{option.time.total:,.2f} s a step, {option.tokens_per_second:,.0f} tokens/s"
    lines = plan.why.splitlines() if config.distributed.strategy is Strategy.auto else []
    if config.trainer.activation_checkpointing == AUTO:
        on = "on" if option.config.trainer.activation_checkpointing else "off"
        lines.append(f"activation checkpointing is {on} (auto)")
    lines += [f"{needed}, {speed} (forecast)", *plan.notes]
    if not plan.fits and not config.plan.enforce:
        lines.append(f"WARNING: {lacking(plan)}; plan.enforce=false goes on")
    return [f"plan      {line}" for line in lines]


def lacking(plan: Plan) -> str:
    """What there is too little of, in numbers."""
    option, machine = plan.chosen, plan.machine
    rows = f"{option.strategy.value}, {option.micro_batch_tokens:,} tokens at once,"
    if machine.gpu is not None and not option.fits_card:
        usable = f"torch can use {_gb(machine.usable_bytes)} of it"
        return f"{rows} needs up to {_gb(option.card_bytes)} on each card, and {usable} ({machine.label})"
    return f"{rows} needs up to {_gb(option.host.upper)} of RAM, and {_gb(machine.host_bytes)} are here"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
