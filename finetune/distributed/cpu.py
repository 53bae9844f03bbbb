"""GPU strategies on CPU processes, so that they can be tried without renting anything.

accelerate turns FSDP on only when its distributed type is a GPU type, and trains an FSDP config on CPU with
plain DDP without a word. Inside `cpu_stand_in` its `PartialState` reports the multi-GPU type over gloo on the
device `cpu`; everything above it is then the code that drives GPUs. Offloading keeps its policy without
pinned memory, which torch has only beside an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


@contextmanager
def cpu_stand_in() -> Iterator[None]:
    """Make accelerate treat this world of gloo processes as a multi-GPU world, until the block ends."""
    prepare_backend, set_device = PartialState._prepare_backend, PartialState.set_device
    set_cpu_offload = FullyShardedDataParallelPlugin.set_cpu_offload
    PartialState._prepare_backend = _gloo_as_multi_gpu
    PartialState.set_device = _set_cpu
    FullyShardedDataParallelPlugin.set_cpu_offload = _offload_unpinned
    try:
        yield
    finally:
        PartialState._prepare_backend = prepare_backend
        PartialState.set_device = set_device
        FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload


def _gloo_as_multi_gpu(
    self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def _set_cpu(self: PartialState) -> None:
    self.device = torch.device("cpu")


def _offload_unpinned(self: FullyShardedDataParallelPlugin) -> None:
    offloads = isinstance(self.cpu_offload, CPUOffloadPolicy) or self.cpu_offload is True
    self.cpu_offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
