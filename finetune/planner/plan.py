"""What would run: every strategy with its memory, its speed and its cost, and the one that is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from finetune.config.rules import NOTHING, resolve
from finetune.config.schema import RunConfig, Strategy
from finetune.config.strategy import TRAITS
from finetune.errors import Refusal
from finetune.hardware.machine import Machine
from finetune.planner.option import Option, settle
from finetune.planner.shape import Shape

NEARLY = 0.95
"""A simpler strategy is taken when it is at least that fast."""
WITHOUT = " without offloading"
ALONE = "one process has nobody to share with"


@dataclass(frozen=True, slots=True)
class Plan:
    """All strategies on one machine."""

    machine: Machine
    options: tuple[Option, ...]
    """The one that is taken first, then those that fit, the fastest first."""
    refused: dict[Strategy, str]
    """Strategies that this config cannot have, and why."""
    why: str
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Option:
        return self.options[0]

    @property
    def fits(self) -> bool:
        return self.chosen.fits


def make_plan(
    config: RunConfig,
    machine: Machine,
    shape: Shape,
    given: Mapping[str, str] = NOTHING,
    subject: str = "the config",
    world: int | None = None,
) -> Plan:
    """Every strategy on this machine, and the choice; `world`: processes that a launcher has started.

    Raises:
        Refusal: the strategy that was asked for (`auto`: the plainest one) does not take this config.
    """
    asked = config.distributed.strategy
    check = partial(resolve, devices=machine.devices, world=world, given=given, subject=subject)
    if asked is not Strategy.auto:
        check(config)
    options: list[Option] = []
    refused: dict[Strategy, str] = {}
    for strategy in TRAITS:
        try:
            facts = check(with_strategy(config, strategy))
        except Refusal as refusal:
            refused[strategy] = "; ".join(f"{problem.where}: {problem.why}" for problem in refusal.problems)
            continue
        offloads = bool(TRAITS[strategy].offloads)
        if facts.num_processes == 1 and strategy not in (Strategy.single, asked) and not offloads:
            refused[strategy] = ALONE
            continue
        options.append(settle(with_strategy(config, strategy), facts, machine, shape))
    if all(option.offloads and option.strategy is not asked for option in options):
        check(config)  # what is wrong under every strategy is told as it is without a plan
    if asked is Strategy.auto:
        chosen, why = choose(_learning_alike(config, options), machine)
    else:
        chosen = next(option for option in options if option.strategy is asked)
        why = f"{asked.value} was asked for"
    rest = [option for option in options if option is not chosen]
    rest.sort(key=lambda option: (not option.fits, -option.tokens_per_second))
    notes = list(machine.notes)
    if machine.host_assumed and any(option.fits_card and not option.fits_host for option in options):
        notes.append(
            "RAM is taken to be twice the memory of the cards: hardware.host_memory_gb says otherwise"
        )
    return Plan(machine, (chosen, *rest), refused, why, notes=tuple(notes))


def _learning_alike(config: RunConfig, options: list[Option]) -> list[Option]:
    """Those that may be chosen from: without `trainer.global_batch_size` fewer processes would learn from
    fewer rows at a time.
    """
    most = max(option.facts.num_processes for option in options)
    fixed = config.trainer.global_batch_size is not None
    return [option for option in options if fixed or option.facts.num_processes == most]


def with_strategy(config: RunConfig, strategy: Strategy) -> RunConfig:
    return replace(config, distributed=replace(config.distributed, strategy=strategy))


def choose(options: list[Option], machine: Machine) -> tuple[Option, str]:
    """The fastest that fits, the simplest of those that are about as fast, offloading last; and why.

    `options` stand in the order of simplicity: one card, copies, shards.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        least = min(options, key=lambda option: option.card_bytes)
        return least, f"nothing fits; {least.strategy.value} needs the least."
    on_card = [option for option in fitting if not option.offloads]
    pool = on_card or fitting
    fastest = max(option.tokens_per_second for option in pool)
    chosen = next(option for option in pool if option.tokens_per_second >= NEARLY * fastest)
    first = f"{chosen.strategy.value}: the fastest that fits, by the forecast"
    if len(pool) == 1:
        first = f"{chosen.strategy.value}: the only one that fits"
        first += WITHOUT if on_card and on_card != fitting else ""
    elif chosen.tokens_per_second < fastest:
        first = f"{chosen.strategy.value}: as fast as any that fits, and the simplest of them"
    cards = machine.num_gpus * machine.num_machines
    if 0 < chosen.facts.num_processes < cards:
        first += f" (on {chosen.facts.num_processes} of {cards} cards)"
    return chosen, "\n".join([f"{first}.", *_simpler(chosen, options)])


def _simpler(chosen: Option, options: list[Option]) -> list[str]:
    """A line on those that are simpler, and why none of them was taken."""
    before = options[: options.index(chosen)]
    simpler = [option for option in before if option.offloads == chosen.offloads or not option.offloads]
    reasons = {
        "more than a card holds": [o for o in simpler if not o.fits_card],
        "more RAM than there is": [o for o in simpler if o.fits_card and not o.fits_host],
        "slower": [o for o in simpler if o.fits],
    }
    told = [f"{', '.join(o.strategy.value for o in found)}: {why}" for why, found in reasons.items() if found]
    return [f"Simpler, but {'; '.join(told)}."] if told else []
