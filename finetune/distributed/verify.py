"""What runs is what was asked: looks at the live objects of every rank before step 1, and stops all of them
if not.

Every fact is read from the thing that runs (the process group, the wrapped model, the engine, the optimizer),
never from the config or the environment: an FSDP config on CPU trains with plain DDP, a launcher starts one
process for two, and neither says a word.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from finetune.config.schema import Strategy
from finetune.distributed.world import gather_objects
from finetune.errors import Problem, Refusal, RunFailed


@dataclass(frozen=True, slots=True)
class Running:
    """What one rank found in its own process, or what it was asked to run."""

    num_processes: int
    strategy: str
    reshard_after_forward: bool | None
    precision: str
    master_dtype: str
    """Dtype of the weights that the optimizer updates."""
    global_batch_size: int
    device: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The live facts that go into the print-out and the report."""

    wrapped_by: str
    optimizer: str
    trainable_parameters: int
    total_parameters: int
    card: str
    """Which card this rank computes on, over all machines; empty on CPU."""
    weights_held: float
    """Share of the model's weights that this rank holds, 0.0 to 1.0."""
    untrained: tuple[str, ...]
    """Trainable parameters that the optimizer does not hold exactly once."""
    rows: tuple[int, ...]
    """Row numbers of this rank's first optimizer step."""


def verify_all_ranks(asked: Running, found: Running, evidence: Evidence) -> list[Evidence]:
    """Compare request and reality on every rank; any difference is refused by all of them together."""
    everyone = gather_objects((found, evidence))
    problems = []
    for rank, (running, seen) in enumerate(everyone):
        wanted, is_so = asked.as_dict(), running.as_dict()
        problems += [
            Problem(f"rank {rank}: {name}={is_so[name]}", f"{wanted[name]} was asked for.")
            for name in wanted
            if is_so[name] != wanted[name]
        ]
        if seen.trainable_parameters == 0:
            problems.append(
                Problem(f"rank {rank}: nothing is trainable", "no parameter requires a gradient.")
            )
        if seen.untrained:
            names = ", ".join(seen.untrained[:5])
            problems.append(Problem(f"rank {rank}: {names}", "trainable, but not once in the optimizer."))
    problems += _shared_rows([seen.rows for _, seen in everyone])
    cards = Counter(seen.card for _, seen in everyone if seen.card)
    problems += [Problem(f"card {card}", f"{n} ranks share it.") for card, n in cards.items() if n > 1]
    if problems:
        raise Refusal(problems, "what runs (it is not what was asked for; nothing was trained)")
    return [seen for _, seen in everyone]


def inspect(model: Any, optimizer: Any, accelerator: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read strategy, precision and parameters off the wrapped model and the optimizer that really run."""
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    engine = model if type(model).__name__ == "DeepSpeedEngine" else None
    parameters = list(model.named_parameters())
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    running = {
        "num_processes": dist.get_world_size() if dist.is_initialized() else 1,
        "strategy": _strategy(model).value,
        "reshard_after_forward": _reshards(model) if isinstance(model, FSDPModule) else None,
        "precision": _precision(engine, accelerator, [p for _, p in trainable]),
        "master_dtype": _dtypes(_masters(engine) if engine is not None else [p for _, p in trainable]),
        "device": accelerator.device.type,
    }
    total, held = sum(_size(p) for _, p in parameters), sum(_held(p) for _, p in parameters)
    evidence = {
        "wrapped_by": type(model).__name__,
        "optimizer": _optimizer_name(optimizer),
        "trainable_parameters": sum(_size(p) for _, p in trainable),
        "total_parameters": total,
        "card": _card(accelerator.device),
        "weights_held": held / total,
        "untrained": _untrained(trainable, optimizer, engine),
    }
    return running, evidence


def _strategy(model: Any) -> Strategy:
    if type(model).__name__ == "DeepSpeedEngine":
        stage = model.zero_optimization_stage()
        offload = model.zero_offload_optimizer()
        offloads = offload is not None and str(offload.device) != "none"
        return Strategy(f"zero{stage}_offload" if offloads else f"zero{stage}")
    if isinstance(model, FSDPModule):
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        offloads = any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in groups)
        return Strategy.fsdp_offload if offloads else Strategy.fsdp
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return Strategy.ddp
    if isinstance(model, PreTrainedModel | PeftModel):
        return Strategy.single
    raise RunFailed(f"the model is wrapped in {type(model).__name__}, which no strategy here uses")


def _reshards(model: torch.nn.Module) -> bool:
    """Whether the decoder layers free their gathered weights after the forward pass (the root never does)."""
    layers = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    groups = [group for layer in layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    return any(group.post_forward_mesh_info is not None for group in groups)


def _precision(engine: Any, accelerator: Any, trainable: list[Any]) -> str:
    if engine is not None:
        return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    named = str(accelerator.mixed_precision)
    if named != "no":
        return named
    # without autocast the weights' own dtype is what is computed in
    return {"bfloat16": "bf16", "float16": "fp16"}.get(_dtypes(trainable), "fp32")


def _optimizer_name(optimizer: Any) -> str:
    """The innermost optimizer: what accelerate and DeepSpeed wrap."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}"


def _untrained(trainable: list[tuple[str, Any]], optimizer: Any, engine: Any) -> tuple[str, ...]:
    if engine is not None:
        zero = engine.optimizer
        groups = zero.fp16_groups if engine.zero_optimization_stage() == 3 else zero.bit16_groups
        held = Counter(id(p) for group in groups for p in group)
    else:
        held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    return tuple(name for name, p in trainable if held[id(p)] != 1)


def _size(parameter: Any) -> int:
    """Elements of the whole parameter; 4-bit weights count what they stand for."""
    if hasattr(parameter, "quant_state") and parameter.quant_state is not None:
        return int(parameter.quant_state.shape.numel())
    return int(parameter.ds_numel) if hasattr(parameter, "ds_numel") else int(parameter.numel())


def _held(parameter: Any) -> float:
    """Elements of the parameter that live in this process."""
    if isinstance(parameter, DTensor):
        return float(parameter.to_local().numel() / max(parameter.numel(), 1) * _size(parameter))
    if hasattr(parameter, "ds_tensor"):
        return float(min(parameter.ds_tensor.numel(), parameter.ds_numel))
    return _size(parameter)


def _dtypes(parameters: Any) -> str:
    return " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) or "none"


def _masters(engine: Any) -> list[torch.Tensor]:
    """The flat partitions that DeepSpeed's optimizer steps on."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def _shared_rows(rows: list[tuple[int, ...]]) -> list[Problem]:
    seen: dict[int, int] = {}
    for rank, numbers in enumerate(rows):
        for number in numbers:
            if number in seen:
                why = f"ranks {seen[number]} and {rank} both have it in step 1."
                return [Problem(f"row {number}", why, "Rows of one step must be disjoint between ranks.")]
            seen[number] = rank
    return []
