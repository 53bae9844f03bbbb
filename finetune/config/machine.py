"""The knobs of planning: the machine that is meant, and how sure a forecast has to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """The machine that is planned for; `hardware=4x_a100_80gb` takes a card of conf/hardware four times."""

    gpu: str | None = None
    """A card of conf/hardware; null: the cards of this machine."""
    num_gpus: int | None = None
    """Cards of each machine; null: 1 of a card that is named, all of this machine."""
    link: str | None = None
    """How the cards are joined: `nvlink`, `pcie3`, `pcie4`, `pcie5`; null: as such cards usually are."""
    host_memory_gb: float | None = None
    """RAM of each machine in GB; null: this machine's, or twice the memory of the cards."""
    network_gbit_s: float = 25.0
    """Between several machines, in one direction."""
    price_per_hour: float | None = None
    """Of the whole machine; null: no cost is worked out."""
    currency: str = "USD"
    minimum_minutes: float = 0.0
    """The shortest time that is billed."""
    name: str | None = None
    """The card as its driver calls it."""
    memory_mib: int | None = None
    """Its memory as the driver shows it."""
    reserved_mib: int | None = None
    """What driver and firmware keep of it."""
    capability: str | None = None
    """CUDA compute capability."""
    bf16: bool | None = None
    """Whether its tensor cores compute in bfloat16."""
    matmul_tflops: float | None = None
    """Dense matrix products in bf16 (fp16 where it has none), summed in float32."""
    memory_gb_s: float | None = None
    """Bandwidth of its memory, GB/s."""
    link_gb_s: float | None = None
    """Bandwidth of its link in one direction, GB/s."""
    p2p: bool | None = None
    """Whether cards copy to each other directly."""


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """What is done with the forecast."""

    enforce: bool = True
    """`train` refuses (exit 3) what the forecast's upper bound says does not fit; false: it goes on."""
    margin: float = 0.0
    """Share of each card's memory to leave free beyond the forecast's own upper bound."""
