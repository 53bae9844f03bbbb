"""What would make a run fit: the cheapest changes first, each worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

from finetune.config.machine import HardwareConfig
from finetune.config.schema import Device, Method, RunConfig, Strategy
from finetune.errors import Refusal
from finetune.hardware.machine import Machine, catalogue, machine_of
from finetune.planner.plan import Plan, make_plan, with_strategy
from finetune.planner.shape import Shape

CONFIGS, MACHINES = 4, 3
"""How many ways are told: changes of the config, and other machines."""
UNSET_LENGTH = 2048
"""Tokens that are proposed for a row where `data.max_length` leaves it to the model's positions."""

Change = Callable[[RunConfig], str | None]
"""Changes a config in place; its words, or None where it does not apply."""


def advise(
    config: RunConfig, machine: Machine, shape: Shape, given: Mapping[str, str], world: int | None = None
) -> tuple[str, ...]:
    """Ways that fit, the cheapest first, with the numbers of each; `world`: as for `make_plan`."""
    found: list[str] = []
    auto = "" if config.distributed.strategy is Strategy.auto else "distributed=auto "
    if auto:
        found += _line(auto.strip(), config, machine, shape, given, world)
    for changes in CHANGES:
        changed = deepcopy(config)
        words = [change(changed) for change in changes]
        if None not in words:
            found += _line(
                auto + " ".join(word or "" for word in words), changed, machine, shape, given, world
            )
    found = found[:CONFIGS]
    if config.launch.device is Device.cpu:
        auto += "launch.device=auto "
        config = replace(config, launch=replace(config.launch, device=Device.auto))
    for name, other in _other_machines(machine):
        if len(found) < CONFIGS + MACHINES:
            found += _line(f"{auto}hardware={name}", config, machine_of(other), shape, given, offload=False)
    return tuple(found)


def _line(
    words: str,
    config: RunConfig,
    machine: Machine,
    shape: Shape,
    given: Mapping[str, str],
    world: int | None = None,
    offload: bool = True,
) -> Iterator[str]:
    plan = _fitting(config, machine, shape, given, world)
    if plan is not None and (offload or not plan.chosen.offloads):
        option, of = plan.chosen, "a card" if machine.gpu else "RAM"
        yield (
            f"{words}: {option.strategy.value}, {option.memory.allocated.expected / 1e9:,.1f} of "
            f"{machine.usable_bytes / 1e9:,.1f} GB {of}, {option.tokens_per_second:,.0f} tokens/s"
        )


def _fitting(
    config: RunConfig, machine: Machine, shape: Shape, given: Mapping[str, str], world: int | None
) -> Plan | None:
    try:
        plan = make_plan(with_strategy(config, Strategy.auto), machine, shape, given, world=world)
    except Refusal:
        return None
    return plan if plan.fits else None


def _recompute(config: RunConfig) -> str | None:
    if config.trainer.activation_checkpointing:
        return None
    config.trainer.activation_checkpointing = True
    return "trainer.activation_checkpointing=true"


def _half_precision(config: RunConfig) -> str | None:
    """For cards without bf16, which compute in float32 unless they are told otherwise."""
    if config.trainer.bf16 is not None or config.trainer.fp16 is not None:
        return None
    config.trainer.fp16 = True
    return "trainer.fp16=true"


def _small_batch(config: RunConfig) -> str | None:
    batch = config.trainer.per_device_train_batch_size
    if batch == 1:
        return None
    config.trainer.per_device_train_batch_size = 1
    if config.trainer.global_batch_size is None:
        accumulation = (config.trainer.gradient_accumulation_steps or 1) * batch
        config.trainer.gradient_accumulation_steps = accumulation
    return "trainer.per_device_train_batch_size=1"


def _eight_bit(config: RunConfig) -> str | None:
    if config.adapter.method is not Method.full or "8bit" in (config.trainer.optim or ""):
        return None
    config.trainer.optim = "adamw_8bit"
    return "trainer.optim=adamw_8bit"


def _bf16_weights(config: RunConfig) -> str | None:
    if config.adapter.method is not Method.full or config.model.dtype is not None:
        return None
    config.model.dtype = "bfloat16"
    return "model.dtype=bfloat16"


def _lora(config: RunConfig) -> str | None:
    if config.adapter.method is not Method.full:
        return None
    config.adapter.method = Method.lora
    return "adapter=lora"


def _qlora(config: RunConfig) -> str | None:
    if config.adapter.method is Method.qlora:
        return None
    config.adapter.method = Method.qlora
    return "adapter=qlora"


def _shorter(config: RunConfig) -> str | None:
    length = config.data.max_length
    if length is not None and length < 1024:
        return None
    config.data.max_length = UNSET_LENGTH if length is None else length // 2
    return f"data.max_length={config.data.max_length}"


CHANGES: tuple[tuple[Change, ...], ...] = (
    (_half_precision,),
    (_recompute,),
    (_small_batch,),
    (_recompute, _small_batch),
    (_eight_bit,),
    (_recompute, _eight_bit),
    (_eight_bit, _bf16_weights),
    (_recompute, _eight_bit, _bf16_weights),
    (_shorter,),
    (_lora,),
    (_recompute, _lora),
    (_qlora,),
    (_recompute, _qlora),
)


def _other_machines(machine: Machine) -> Iterator[tuple[str, HardwareConfig]]:
    """A larger card first, then more of the same, then more of a larger one."""
    cards = sorted(catalogue().items(), key=lambda item: item[1].memory_mib or 0)
    least = 1.2 * machine.total_bytes if machine.gpu else 0
    larger = [(n, c) for n, c in cards if (c.memory_mib or 0) * 2**20 > least]
    for name, card in larger:
        yield f"{machine.num_gpus or 1}x_{name}", replace(card, num_gpus=machine.num_gpus or 1)
    for count in (2, 4, 8):
        if count > machine.num_gpus and machine.gpu in dict(cards):
            yield f"{count}x_{machine.gpu}", replace(dict(cards)[machine.gpu], num_gpus=count)
    for count in (2, 4, 8):
        for name, card in larger:
            if count > machine.num_gpus:
                yield f"{count}x_{name}", replace(card, num_gpus=count)
