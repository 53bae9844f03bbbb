"""The live state under DeepSpeed's ZeRO: float32 masters and optimizer states in flat buffers, cut over the
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from finetune.errors import RunFailed
from finetune.model.state import WEIGHT
from finetune.training.live import (
    Like,
    Live,
    Range,
    Settings,
    buffers,
    group_numbers,
    numbers_of,
    set_groups,
    trained_parameters,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a parameter's own stretch lies in a flat buffer of this rank."""

    parameter: torch.nn.Parameter
    whole: torch.Size
    start: int
    """In the flattened parameter."""
    offset: int
    """In the flat buffer."""
    length: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One buffer that the optimizer updates, and the parameters in it (also those of other ranks)."""

    masters: torch.Tensor
    parameters: list[torch.nn.Parameter]
    pieces: list[Piece]


def live_zero(model: torch.nn.Module, engine: Any) -> Live:
    """The state of a DeepSpeed engine."""
    stage3 = engine.zero_optimization_partition_weights()
    flats = _stage3(engine.optimizer) if stage3 else _stage12(engine.optimizer)
    return ZeroLive(model, engine.optimizer, flats, stage3)


def _stage12(optimizer: Any) -> list[Flat]:
    """Stages 1 and 2 keep the place of each parameter at the parameter."""
    masters = [group["params"][0] for group in optimizer.optimizer.param_groups]
    members = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
    flats = []
    for flat, parameters in zip(masters, members, strict=True):
        pieces = []
        for parameter in parameters:
            at = parameter._hp_mapping
            if at is not None:
                inside, of = at.lp_fragment_address, at.get_hp_fragment_address()
                pieces.append(Piece(parameter, parameter.shape, inside.start, of.start, inside.numel))
        flats.append(Flat(flat, list(parameters), pieces))
    return flats


def _stage3(optimizer: Any) -> list[Flat]:
    """Stage 3 cuts each parameter into equal stretches and lays them one after the other."""
    rank, flats = dist.get_rank(), []
    for flat, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        pieces, offset = [], 0
        for parameter in parameters:
            stretch = parameter.partition_numel()
            start = rank * stretch
            length = min(stretch, parameter.ds_numel - start)
            if length > 0:
                pieces.append(Piece(parameter, parameter.ds_shape, start, offset, length))
            offset += stretch
        flats.append(Flat(flat, list(parameters), pieces))
    return flats


class ZeroLive:
    """One torch optimizer over flat buffers."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, flats: list[Flat], stage3: bool) -> None:
        self.model = model
        self.names = {id(parameter): name for name, parameter in trained_parameters(model).items()}
        self.zero = optimizer
        self.optimizer: torch.optim.Optimizer = optimizer.optimizer
        self.flats = flats
        self.stage3 = stage3

    def ranges(self) -> Iterator[Range]:
        yield from buffers(self.model)
        for flat in self.flats:
            kinds = {WEIGHT: flat.masters, **self._spread(flat)}
            for piece in flat.pieces:
                name = self.names[id(piece.parameter)]
                for kind, values in kinds.items():
                    mine = values.detach().narrow(0, piece.offset, piece.length)
                    yield Range(kind, name, piece.start, mine, piece.whole, everywhere=False)

    def settings(self) -> Settings:
        numbers: dict[str, dict[str, float]] = {}
        for flat in self.flats:
            of_all = numbers_of(self.optimizer.state.get(flat.masters, {}), "a flat buffer")
            numbers |= {self.names[id(parameter)]: of_all for parameter in flat.parameters}
        return Settings([group_numbers(group) for group in self.optimizer.param_groups], numbers)

    def make(self, settings: Settings, like: Like) -> None:
        set_groups(self.optimizer.param_groups, settings.groups)
        for flat in self.flats:
            names = [self.names[id(parameter)] for parameter in flat.parameters]
            kinds = {kind for name in names for kind in like.get(name, {})}
            made: dict[str, Any] = {kind: torch.zeros_like(flat.masters) for kind in sorted(kinds)}
            on_device = any(
                group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups
            )
            where = flat.masters.device if on_device else torch.device("cpu")
            numbers = next((settings.numbers[name] for name in names if settings.numbers.get(name)), {})
            made |= {kind: torch.tensor(value, device=where) for kind, value in numbers.items()}
            if made:
                self.optimizer.state[flat.masters] = made
        if not self.stage3:
            self.zero._lazy_init_hp_params_optimizer_state()  # what DeepSpeed does behind the first step

    def settle(self) -> None:
        """Bring the masters to the weights that the model computes with."""
        if not self.stage3:
            self.zero.update_lp_params()
            return
        for flat in self.flats:
            mine = {id(piece.parameter): piece for piece in flat.pieces}
            for parameter in flat.parameters:
                piece = mine.get(id(parameter))
                if piece is not None:
                    values = flat.masters.detach().narrow(0, piece.offset, piece.length)
                    parameter.ds_tensor.data[: piece.length].copy_(values)
            gathered = [p for p in flat.parameters if p.ds_status is ZeroParamStatus.AVAILABLE]
            if (
                gathered
            ):  # small ones stay so from step to step: let go here, gathered anew when they are used
                gathered[0].partition(gathered, has_been_updated=False)

    def _spread(self, flat: Flat) -> dict[str, torch.Tensor]:
        """The states that are as long as the buffer; one of another size belongs to no parameter."""
        found = {}
        for kind, value in self.optimizer.state.get(flat.masters, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                if value.shape != flat.masters.shape:
                    raise RunFailed(
                        f"no checkpoint can hold this optimizer under ZeRO: its {kind} has {value.numel():,} "
                        f"values for a buffer of {flat.masters.numel():,}.\n"
                        "  Use a trainer.optim whose states are as large as the weights (adamw_torch_fused), "
                        "or another strategy."
                    )
                found[kind] = value
        return found
