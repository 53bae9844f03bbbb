"""A plan as a table: for the terminal and, the same rows, for a notebook."""

from __future__ import annotations

from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from finetune.config.schema import RunConfig
from finetune.config.trainer_fields import AUTO
from finetune.hardware.machine import Machine
from finetune.planner.duration import duration_of
from finetune.planner.host import resident_memory
from finetune.planner.memory import Bound
from finetune.planner.option import Option
from finetune.planner.plan import Plan

BAR = 6
COLUMNS = ("strategy", "fits", "of a card", "GB a card", "RAM", "sent", "s/step", "tokens/s")
"""`GB a card`: expected to at most; `RAM`: GB of a host; `sent`: GB of a card in a step."""
ON_CPU = {"of a card": "of the RAM", "GB a card": "GB a process"}


def plan_lines(plan: Plan, config: RunConfig, columns: int = 80, colour: bool = False) -> str:
    """Title, table, choice and what else is to be told."""
    out = StringIO()
    console = Console(
        file=out,
        width=columns,
        force_terminal=colour,
        force_jupyter=False,  # in a notebook rich would display the lines instead of writing them
        no_color=not colour,
        highlight=False,
    )
    machine = plan.machine
    console.print(_title(machine))
    console.print(_table(plan))
    for line in told_lines(plan, config):
        console.print(line)
    return out.getvalue().rstrip("\n")


def side_by_side(plans: list[tuple[Plan, RunConfig]], columns: int = 80) -> str:
    """One line for each machine: its chosen strategy."""
    out = StringIO()
    shown = (*COLUMNS[:2], "GB a card", "s/step", "tokens/s")
    table = _headed("machine", *shown, "hours", "cost")
    for plan, config in plans:
        row = dict(zip(COLUMNS, cells(plan.chosen, plan), strict=True))
        duration = duration_of(plan.chosen, config, plan.machine)
        hours = "-" if duration.seconds is None else f"{duration.seconds / 3600:,.1f}"
        cost = "-" if duration.cost is None else f"{duration.cost:,.2f}"
        table.add_row(plan.machine.label, *(row[name] for name in shown), hours, cost)
    console = Console(file=out, width=columns, force_jupyter=False, no_color=True, highlight=False)
    console.print(table)
    return out.getvalue().rstrip("\n")


def told_lines(plan: Plan, config: RunConfig) -> list[str]:
    """What is said below the table: why, the batch, the duration, what would fit, what is out."""
    lines = [*plan.why.splitlines(), *_batch(plan, config), *_settled(plan, config), *plan.notes]
    if plan.advice:
        lines += ["What would fit:", *(f"  {advice}" for advice in plan.advice)]
    reasons: dict[str, list[str]] = {}
    for strategy, reason in plan.refused.items():
        reasons.setdefault(reason, []).append(strategy.value)
    return [*lines, *(f"out: {', '.join(names)}: {reason}" for reason, names in reasons.items())]


def _settled(plan: Plan, config: RunConfig) -> list[str]:
    """What was chosen where the config leaves it open: the precision, and which layers run twice."""
    facts = plan.chosen.facts
    lines = [f"precision {facts.precision} ({facts.precision_reason})"]
    if config.trainer.activation_checkpointing == AUTO:
        twice = [o.strategy.value for o in plan.options if o.config.trainer.activation_checkpointing]
        lines.append(f"activation checkpointing (auto): on for {', '.join(twice) or 'none'}")
    return lines


def _title(machine: Machine) -> str:
    if machine.gpu is None:
        return f"{machine.label}: {machine.usable_bytes / 1e9:,.1f} GB for all processes"
    copies = "" if machine.p2p else ", no peer-to-peer copies"
    link = f"{machine.link} {machine.link_bytes_s / 1e9:,.1f} GB/s{copies}"
    return (
        f"{machine.label}: {machine.usable_bytes / 1e9:,.1f} GB a card for torch, "
        f"{machine.host_bytes / 1e9:,.0f} GB RAM, {link}"
    )


def _table(plan: Plan) -> Table:
    table = _headed(*(name if plan.machine.gpu else ON_CPU.get(name, name) for name in COLUMNS))
    for option in plan.options:
        table.add_row(*cells(option, plan), style="bold" if option is plan.chosen else None)
    return table


def _headed(*titles: str) -> Table:
    """A table without rows: three columns of words, then numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position < 3 else "right", no_wrap=True)
    return table


def cells(option: Option, plan: Plan) -> tuple[str, ...]:
    """One row."""
    memory, time, traffic = option.memory, option.time, option.traffic
    share = option.card_bytes / plan.machine.usable_bytes
    bound = Bound(memory.allocated.expected, option.card_bytes)
    if plan.machine.gpu is None:
        share, bound = option.host.upper / plan.machine.host_bytes, resident_memory(memory)
    filled = min(round(share * BAR), BAR)
    fits = "yes" if option.fits else "RAM" if option.fits_card else "no"
    return (
        option.strategy.value,
        fits,
        f"{'#' * filled}{'.' * (BAR - filled)} {share:4.0%}",
        f"{bound.expected / 1e9:,.1f}-{bound.upper / 1e9:,.1f}",
        f"{option.host.expected / 1e9:,.0f}",
        f"{(traffic.between_cards + traffic.to_host) / 1e9:,.1f}",
        f"{time.total:,.2f}" if time.total < 100 else f"{time.total:,.0f}",
        f"{option.tokens_per_second:,.0f}",
    )


def _batch(plan: Plan, config: RunConfig) -> list[str]:
    duration = duration_of(plan.chosen, config, plan.machine)
    lines = [f"{plan.chosen.facts.batch.line}, {plan.chosen.tokens_per_step:,.0f} tokens at most"]
    if duration.seconds is None:
        return [*lines, f"forecast: no duration: {duration.assumption}"]
    hours = duration.seconds / 3600
    cost = "" if duration.cost is None else f", {duration.cost:,.2f} {plan.machine.currency}"
    return [
        *lines,
        f"forecast: {duration.steps:,} steps, {hours:,.1f} h{cost}, start included ({duration.assumption})",
    ]
