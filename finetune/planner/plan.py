"""What would run: every strategy with its memory, its speed and its cost, and the one that is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from finetune.config.rules import NOTHING, RunFacts, resolve
from finetune.config.schema import RunConfig, Strategy
from finetune.config.strategy import TRAITS
from finetune.errors import Refusal
from finetune.hardware.machine import Machine
from finetune.planner.from_config import job_of
from finetune.planner.host import Outside, outside_memory
from finetune.planner.memory import Memory, device_memory
from finetune.planner.placement import Placement
from finetune.planner.shape import Shape
from finetune.planner.speed import StepTime, step_time
from finetune.planner.traffic import Traffic, traffic_of

NEARLY = 0.95
"""A simpler strategy is taken when it is at least that fast."""
ALONE = "one process has nobody to share with"


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy on the machine, worked out."""

    strategy: Strategy
    facts: RunFacts
    memory: Memory
    outside: Outside
    traffic: Traffic
    time: StepTime
    tokens_per_step: float
    """Over all cards, every row as long as it may be."""
    fits_card: bool
    fits_host: bool

    @property
    def fits(self) -> bool:
        return self.fits_card and self.fits_host

    @property
    def offloads(self) -> bool:
        return bool(TRAITS[self.strategy].offloads)

    @property
    def tokens_per_second(self) -> float:
        """Over all cards."""
        return self.tokens_per_step / self.time.total


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
) -> Plan:
    """Every strategy on this machine, and the choice.

    Raises:
        Refusal: the strategy that was asked for does not take this config, or none does.
    """
    asked = config.distributed.strategy
    options: list[Option] = []
    refused: dict[Strategy, str] = {}
    for strategy in TRAITS:
        try:
            facts = resolve(
                with_strategy(config, strategy), devices=machine.devices, given=given, subject=subject
            )
        except Refusal as refusal:
            if strategy is asked:
                raise
            refused[strategy] = "; ".join(f"{problem.where}: {problem.why}" for problem in refusal.problems)
            continue
        if (
            facts.num_processes == 1
            and strategy not in (Strategy.single, asked)
            and not TRAITS[strategy].offloads
        ):
            refused[strategy] = ALONE
            continue
        options.append(option_of(config, facts, machine, shape))
    if not options:
        resolve(config, devices=machine.devices, given=given, subject=subject)
    if asked is Strategy.auto:
        chosen, why = choose(options)
    else:
        chosen = next(option for option in options if option.strategy is asked)
        why = f"{asked.value} was asked for"
    rest = [option for option in options if option is not chosen]
    rest.sort(key=lambda option: (not option.fits, -option.tokens_per_second))
    return Plan(machine, (chosen, *rest), refused, why)


def option_of(config: RunConfig, facts: RunFacts, machine: Machine, shape: Shape) -> Option:
    """A strategy, worked out."""
    traits, accumulation = TRAITS[facts.strategy], facts.batch.accumulation
    job = job_of(config, facts, shape)
    place = Placement(job, traits, facts.num_processes, config.distributed.reshard_after_forward)
    per_host = -(-facts.num_processes // max(config.launch.num_machines, 1))
    memory, outside = device_memory(place), outside_memory(place, per_host)
    needed = memory.needed + config.plan.margin * machine.total_bytes
    on_cpu = facts.device == "cpu"
    host = outside.memory.expected + (needed * per_host if on_cpu else 0)
    return Option(
        facts.strategy,
        facts=facts,
        memory=memory,
        outside=outside,
        traffic=traffic_of(place, accumulation),
        time=step_time(place, machine, accumulation),
        tokens_per_step=job.tokens * accumulation * facts.num_processes,
        fits_card=needed <= machine.usable_bytes,
        fits_host=host <= machine.host_bytes,
    )


def with_strategy(config: RunConfig, strategy: Strategy) -> RunConfig:
    return replace(config, distributed=replace(config.distributed, strategy=strategy))


def choose(options: list[Option]) -> tuple[Option, str]:
    """The fastest that fits, the simplest of those that are about as fast, offloading last; and why.

    `options` stand in the order of simplicity: one card, copies, shards.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        least = min(options, key=lambda option: option.memory.needed)
        return least, "nothing fits; this one needs the least"
    on_card = [option for option in fitting if not option.offloads]
    pool = on_card or fitting
    fastest = max(option.tokens_per_second for option in pool)
    chosen = next(option for option in pool if option.tokens_per_second >= NEARLY * fastest)
    return chosen, _why(chosen, pool, options)


def _why(chosen: Option, pool: list[Option], options: list[Option]) -> str:
    """Two lines: why this one, and why none that is simpler."""
    name = chosen.strategy.value
    first = f"{name}: the fastest that fits, by the forecast"
    if len(pool) == 1:
        first = f"{name}: the only one that fits{' on the cards' if not chosen.offloads else ''}"
    elif chosen.tokens_per_second < max(option.tokens_per_second for option in pool):
        first = f"{name}: as fast as any that fits, and the simplest of them"
    simpler = [o for o in options[: options.index(chosen)] if o.offloads == chosen.offloads or not o.offloads]
    lacking = ", ".join(o.strategy.value for o in simpler if not o.fits)
    slower = ", ".join(o.strategy.value for o in simpler if o.fits)
    second = [f"{lacking}: more than a card holds" if lacking else "", f"{slower}: slower" if slower else ""]
    return "\n".join([f"{first}.", *(f"Simpler, but {line}." for line in second if line)])
