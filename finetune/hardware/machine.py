"""A machine to plan for: this one, or cards of the catalogue in conf/hardware."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import cache

import yaml

from finetune.config.devices import Devices
from finetune.config.machine import HardwareConfig
from finetune.config.schema import Device
from finetune.errors import Problem, Refusal
from finetune.hardware.memory import total_bytes
from finetune.hardware.probe import Card as DriverCard
from finetune.hardware.probe import probe_devices, usable_cards
from finetune.paths import assets

MIB, GB = 2**20, 10**9
CONTEXT_BYTES = 500 * MIB
"""CUDA's context and the libraries' kernels in one process, outside torch's own count."""
NCCL_BYTES = 800 * MIB
"""What NCCL's channels take beside it when several cards work together."""

LINKS = {"nvlink": None, "pcie3": 15.75, "pcie4": 31.5, "pcie5": 63.0}
"""GB/s in one direction, 16 lanes (PCI-SIG); NVLink as the card has it."""

UNKNOWN = HardwareConfig(
    gpu="unknown", bf16=True, matmul_tflops=70, memory_gb_s=900, link="pcie4", link_gb_s=31.5, p2p=False
)
"""What a card that is not in the catalogue is taken for; its memory is the driver's."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cards of one kind, joined by a link, in one or several hosts."""

    label: str
    gpu: str | None
    """None: no card, the CPU computes."""
    num_gpus: int
    """Of each host."""
    num_machines: int
    usable_bytes: int
    """Of each card, for torch: what the driver keeps and a process's own context are gone."""
    total_bytes: int
    capability: float
    flops: float
    """Of dense matrix products, each second."""
    memory_bytes_s: float
    link: str
    link_bytes_s: float
    """Between the cards of a host, for one of them in one direction."""
    network_bytes_s: float
    """Between hosts, for one host in one direction."""
    p2p: bool
    host_bytes: int
    """RAM of each host."""
    price_per_hour: float | None
    currency: str
    minimum_minutes: float
    devices: Devices
    """As the rules for configs see it."""
    host_assumed: bool = False
    """Nobody has said how much RAM there is."""
    notes: tuple[str, ...] = ()


@cache
def catalogue() -> dict[str, HardwareConfig]:
    """The cards of conf/hardware by name."""
    found = {}
    for file in sorted((assets() / "conf" / "hardware").glob("*.yaml")):
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        if values and values.get("gpu"):
            found[file.stem] = HardwareConfig(**values)
    return found


class UnknownCard(Refusal):
    """A card whose sizes are neither in conf/hardware nor told by its driver."""


def machine_of(config: HardwareConfig, num_machines: int = 1, device: Device = Device.auto) -> Machine:
    """The machine that a config means; `device` is where its runs take place (`launch.device`).

    Raises:
        UnknownCard: a card without sizes.
        Refusal: a link that is not known.
    """
    notes: tuple[str, ...] = ()
    devices = None
    if config.gpu is None:
        cards, found = usable_cards(), probe_devices()
        if not cards or device is Device.cpu:
            return _cpu(config, num_machines, found)
        devices = found if config.num_gpus is None else None
        described, notes = _described(cards)
        config = _over(described, config, len(cards))
    missing = [name for name in NEEDED if getattr(config, name) is None]
    if missing:
        why = f"of {config.name or config.gpu} it is not known, so it has to be set"
        raise UnknownCard([Problem(f"hardware.{name}", why) for name in missing], "the machine")
    if config.link is not None and config.link not in LINKS:
        why = f"expected one of {', '.join(LINKS)}"
        raise Refusal([Problem(f"hardware.link={config.link}", why)], "the machine")
    return _machine(config, num_machines, devices or _as_found(config), notes)


NEEDED = ("memory_mib", "matmul_tflops", "memory_gb_s")


def _as_found(config: HardwareConfig) -> Devices:
    """What a probe would find there."""
    count = config.num_gpus or 1
    names = (config.gpu or "",) * count
    return Devices(count, names, bool(config.bf16), driver_gpus=count, cpu_cores=os.cpu_count() or 1)


def _machine(config: HardwareConfig, num_machines: int, devices: Devices, notes: tuple[str, ...]) -> Machine:
    known = catalogue().get(config.gpu or "")
    count = config.num_gpus or 1
    link = config.link or "pcie4"
    changed = known is not None and link != known.link
    link_gb_s = (LINKS[link] if changed else config.link_gb_s) or LINKS[link] or config.link_gb_s or 31.5
    total = (config.memory_mib or 0) * MIB
    several = count * num_machines > 1
    outside = (config.reserved_mib or 0) * MIB + CONTEXT_BYTES + (NCCL_BYTES if several else 0)
    host = config.host_memory_gb * GB if config.host_memory_gb else 2 * total * count
    hosts = f"{num_machines} machines with " if num_machines > 1 else ""
    return Machine(
        label=f"{hosts}{count}x {config.gpu}",
        gpu=config.gpu,
        num_gpus=count,
        num_machines=num_machines,
        usable_bytes=total - outside,
        total_bytes=total,
        capability=float(config.capability or 8.0),
        flops=(config.matmul_tflops or 0) * 1e12,
        memory_bytes_s=(config.memory_gb_s or 0) * GB,
        link=link,
        link_bytes_s=link_gb_s * GB,
        network_bytes_s=config.network_gbit_s / 8 * GB,
        p2p=bool(config.p2p),
        host_bytes=int(host),
        price_per_hour=config.price_per_hour,
        currency=config.currency,
        minimum_minutes=config.minimum_minutes,
        devices=devices,
        host_assumed=not config.host_memory_gb,
        notes=notes,
    )


def _described(cards: tuple[DriverCard, ...]) -> tuple[HardwareConfig, tuple[str, ...]]:
    """The catalogue's entry of this machine's cards; the smallest memory counts where they differ."""
    smallest = min(cards, key=lambda card: card.memory_bytes)
    named = [
        entry
        for entry in catalogue().values()
        if entry.name
        and entry.name.lower() in smallest.name.lower()
        and abs((entry.memory_mib or 0) * MIB - smallest.memory_bytes) < 0.06 * smallest.memory_bytes
    ]
    if named:  # the longest name: a card may be called like another one with more behind it
        return max(named, key=lambda entry: len(entry.name or "")), ()
    note = f"{smallest.name} is not in conf/hardware: its speed and link are guesses, its memory is not"
    guess = _over(UNKNOWN, HardwareConfig(memory_mib=smallest.memory_bytes // MIB or None), len(cards))
    guess.bf16, guess.capability = smallest.capability >= 8, f"{smallest.capability}.0"
    return guess, (note,)


def _over(entry: HardwareConfig, config: HardwareConfig, count: int) -> HardwareConfig:
    """An entry with what the config sets itself."""
    defaults = HardwareConfig()
    changed = {
        f.name: getattr(config, f.name)
        for f in fields(HardwareConfig)
        if getattr(config, f.name) != getattr(defaults, f.name)
    }
    kept = {f.name: getattr(entry, f.name) for f in fields(HardwareConfig)}
    host = total_bytes() / GB
    return HardwareConfig(**{**kept, "num_gpus": count, "host_memory_gb": host, **changed})


def _cpu(config: HardwareConfig, num_machines: int, devices: Devices) -> Machine:
    """The CPU computes, and processes share its memory."""
    host = int(config.host_memory_gb * GB) if config.host_memory_gb else total_bytes()
    cores = devices.cpu_cores
    return Machine(
        label=f"the CPU ({cores} core{'s' * (cores > 1)})",
        gpu=None,
        num_gpus=0,
        num_machines=num_machines,
        usable_bytes=host,
        total_bytes=host,
        capability=0,
        flops=cores * 40e9,  # float32 with AVX2, about half of the peak at 3 GHz
        memory_bytes_s=20 * GB,
        link="memory",
        link_bytes_s=2 * GB,
        network_bytes_s=config.network_gbit_s / 8 * GB,
        p2p=False,
        host_bytes=host,
        price_per_hour=config.price_per_hour,
        currency=config.currency,
        minimum_minutes=config.minimum_minutes,
        devices=devices,
    )
