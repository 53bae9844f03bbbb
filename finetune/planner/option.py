"""One strategy on a machine, worked out; what is `auto` in its batch is chosen here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from finetune.config.batch import Batch
from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig, Strategy
from finetune.config.strategy import TRAITS
from finetune.config.trainer_fields import AUTO
from finetune.hardware.machine import Machine
from finetune.planner.from_config import job_of
from finetune.planner.host import Outside, outside_memory, resident_memory
from finetune.planner.job import Job
from finetune.planner.memory import Bound, Memory, device_memory
from finetune.planner.placement import Placement
from finetune.planner.shape import Shape
from finetune.planner.speed import StepTime, flops_per_position, flops_per_token, step_time
from finetune.planner.traffic import Traffic, traffic_of


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy on the machine, worked out."""

    strategy: Strategy
    config: RunConfig
    """With what was chosen where it says `auto`."""
    facts: RunFacts
    memory: Memory
    outside: Outside
    traffic: Traffic
    time: StepTime
    tokens_per_step: float
    """Over all cards, every row as long as it may be."""
    micro_batch_tokens: int
    """Of one card, every row as long as it may be."""
    flops: dict[str, float | None]
    """What the model needs for a token, layers run twice not counted: `token` by its weights, `position` for
    each position that it looks at, `window` of them at most.
    """
    card_bytes: float
    """What a card must have for torch, `plan.margin` included."""
    host: Bound
    """RAM of one host; where the CPU computes, all of the run's memory is in it."""
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


def settle(config: RunConfig, facts: RunFacts, machine: Machine, shape: Shape) -> Option:
    """The option with what is `auto` settled: the largest micro batch that fits, layers run twice only where
    that lets more tokens through (or nothing else fits).
    """
    fitting: list[Option] = []
    for recompute in _recomputations(config):
        for size in _sizes(config, facts):
            batch = Batch(size, facts.batch.global_size // (size * facts.num_processes), facts.num_processes)
            trainer = replace(
                config.trainer, activation_checkpointing=recompute, per_device_train_batch_size=size
            )
            option = _option(replace(config, trainer=trainer), replace(facts, batch=batch), machine, shape)
            if option.fits:
                fitting.append(option)
                break
    return max(fitting, key=lambda option: option.tokens_per_second, default=option)


def _recomputations(config: RunConfig) -> tuple[bool, ...]:
    wanted = config.trainer.activation_checkpointing
    return (False, True) if wanted == AUTO else (wanted,)


def _sizes(config: RunConfig, facts: RunFacts) -> Iterator[int]:
    """Rows of a micro batch, the largest first: those that make up the global batch evenly."""
    if config.trainer.per_device_train_batch_size != AUTO:
        yield facts.batch.per_device
        return
    rows = facts.batch.global_size // facts.num_processes
    yield from (size for size in range(rows, 0, -1) if rows % size == 0)


def _option(config: RunConfig, facts: RunFacts, machine: Machine, shape: Shape) -> Option:
    traits, accumulation = TRAITS[facts.strategy], facts.batch.accumulation
    job = job_of(config, facts, shape)
    place = Placement(
        job, traits, facts.num_processes, config.distributed.reshard_after_forward, facts.device
    )
    per_host = -(-facts.num_processes // machine.num_machines)
    memory, outside = device_memory(place), outside_memory(place, per_host)
    margin, on_cpu = config.plan.margin * machine.total_bytes, facts.device == "cpu"
    host = outside.memory
    if on_cpu:
        process = resident_memory(memory)
        expected, upper = process.expected * per_host, process.upper * per_host + margin
        host = Bound(max(host.expected, expected), max(host.upper, upper))
    card_bytes = memory.needed + (0.0 if on_cpu else margin)
    return Option(
        facts.strategy,
        config=config,
        facts=facts,
        memory=memory,
        outside=outside,
        traffic=traffic_of(place, accumulation),
        time=step_time(place, machine, accumulation),
        tokens_per_step=job.tokens * accumulation * facts.num_processes,
        micro_batch_tokens=job.tokens,
        flops=_flops(job),
        card_bytes=card_bytes,
        host=host,
        fits_card=on_cpu or card_bytes <= machine.usable_bytes,
        fits_host=host.upper <= machine.host_bytes,
    )


def _flops(job: Job) -> dict[str, float | None]:
    position, window = flops_per_position(job), job.shape.sliding_window
    seen = min(job.row_tokens, window or job.row_tokens) / 2
    return {"token": flops_per_token(job) - seen * position, "position": position, "window": window}
