"""What a machine has that a config is checked against (`finetune.hardware.probe` counts it)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of this machine that the run may use."""

    gpus: int = 0
    """GPUs that the installed torch can use."""
    gpu_names: tuple[str, ...] = ()
    bf16: bool = False
    """Every one of these GPUs computes in bfloat16."""
    driver_gpus: int = 0
    """GPUs that the NVIDIA driver shows, usable or not."""
    cpu_cores: int = 1
    unusable: str = ""
    """Why torch cannot use the driver's GPUs; empty when it can, or when there are none."""
