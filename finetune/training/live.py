"""What training changes, where it lies in memory: weights and optimizer states of every strategy as ranges
of flat tensors.

A tensor of the state is known by its kind (`weight`, `buffer`, or the optimizer's own word, such as
`exp_avg`) and the parameter's name in the plain model. Every rank holds a range of it, counted in elements of
the flattened tensor: all of it (single, ddp), rows of it (fsdp shards the first dimension), or a stretch
(ZeRO cuts flat buffers). So nothing is gathered to save, and any rank of any strategy can take up its own.

torch's distributed checkpoint does this for FSDP alone, and DeepSpeed's universal checkpoints lose a part of
ZeRO-3's optimizer (the losses leave the straight run's two steps after resuming).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor, Shard

from finetune.errors import RunFailed
from finetune.model.export import plain_tensors, reshard
from finetune.model.state import BUFFER, WEIGHT


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of one tensor of the state: this rank's own memory."""

    kind: str
    name: str
    start: int
    """Of the first element in the flattened whole tensor."""
    values: torch.Tensor
    """Flat; writing to it changes the live state."""
    whole: torch.Size
    """Shape of the whole tensor."""
    everywhere: bool
    """Every rank holds the same range."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The small part of an optimizer: numbers of each group of parameters, and of each parameter."""

    groups: list[dict[str, Any]]
    """Learning rate, betas, ...; groups without parameters are left out."""
    numbers: dict[str, dict[str, float]]
    """Parameter -> e.g. `{"step": 12.0}`."""


Like = dict[str, dict[str, torch.Tensor]]
"""Parameter -> kind of optimizer state -> a tensor on the device `meta` with its shape and dtype."""


class Live(Protocol):
    """The state of a run under one strategy."""

    optimizer: torch.optim.Optimizer

    def ranges(self) -> Iterator[Range]:
        """Every range of this rank; the optimizer's are there from the first step on, or once made."""

    def settings(self) -> Settings: ...

    def make(self, settings: Settings, like: Like) -> None:
        """Give a fresh optimizer the settings of a saved one, and states to be filled through `ranges`."""

    def settle(self) -> None:
        """Carry filled ranges to whatever else of this strategy holds a copy. Every rank calls it."""


def live_state(trainer: Any) -> Live:
    """The state of a trainer that has wrapped its model."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    reshard(model)
    if trainer.is_deepspeed_enabled:
        from finetune.training.live_zero import live_zero

        return live_zero(model, trainer.model_wrapped)
    return PlainLive(model, trainer.optimizer.optimizer)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are learnt, by their names in the plain model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def buffers(model: torch.nn.Module) -> Iterator[Range]:
    """Buffers that belong to a model's weights; an adapter has none, and its base is not saved."""
    if isinstance(model, PeftModel):
        return
    for name, tensor in plain_tensors(model):
        if not isinstance(tensor, torch.nn.Parameter):
            yield Range(BUFFER, name, 0, tensor.detach().view(-1), tensor.shape, everywhere=True)


class PlainLive:
    """One torch optimizer over the model's own parameters: single, ddp, and fsdp with its DTensors."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.parameters = trained_parameters(model)
        self.optimizer = optimizer
        known = {id(parameter) for parameter in self.parameters.values()}
        if not {id(parameter) for parameter in optimizer.state} <= known:
            raise RunFailed(
                "the optimizer updates other tensors than the model's own: nothing is saved of it."
            )

    def ranges(self) -> Iterator[Range]:
        yield from buffers(self.model)
        for name, parameter in self.parameters.items():
            yield _range(WEIGHT, name, parameter)
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield _range(kind, name, value)

    def settings(self) -> Settings:
        numbers = {
            name: numbers_of(self.optimizer.state.get(parameter, {}), name)
            for name, parameter in self.parameters.items()
        }
        return Settings([group_numbers(group) for group in self._groups()], numbers)

    def make(self, settings: Settings, like: Like) -> None:
        """Through the optimizer's own `load_state_dict`, which knows where its step counters live."""
        set_groups(self._groups(), settings.groups)
        content = {**self.optimizer.state_dict(), "state": {}}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        numbered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(numbered):
            name = names[id(parameter)]
            made: dict[str, Any] = {
                kind: _laid_out_as(parameter, saved) for kind, saved in like.get(name, {}).items()
            }
            made |= {kind: torch.tensor(value) for kind, value in settings.numbers.get(name, {}).items()}
            if made:
                content["state"][number] = made
        self.optimizer.load_state_dict(content)

    def settle(self) -> None:
        """Nothing: there is no other copy."""

    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if group["params"]]


def group_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON holds them."""
    plain = {key: value for key, value in group.items() if key != "params"}
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in plain.items()
        if value is None or isinstance(value, bool | int | float | str | list | tuple | torch.Tensor)
    }


def set_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Give an optimizer's groups their saved settings back."""
    if len(groups) != len(saved):
        raise RunFailed(
            f"the checkpoint holds {len(saved)} groups of parameters, this run has {len(groups)}."
        )
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            now = group.get(key)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def numbers_of(state: dict[str, Any], name: str) -> dict[str, float]:
    """The single numbers among an optimizer's states of a parameter; what is neither number nor tensor cannot
    be saved, and is an error.
    """
    numbers = {}
    for kind, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                numbers[kind] = value.item()
        elif isinstance(value, bool | int | float):
            numbers[kind] = value
        elif value is not None:
            raise RunFailed(
                f"no checkpoint can hold this optimizer: its state of {name} has {kind}, a "
                f"{type(value).__name__}.\n  Use another trainer.optim, e.g. adamw_torch_fused."
            )
    return numbers


def _range(kind: str, name: str, tensor: torch.Tensor) -> Range:
    whole = tensor.detach()
    if not isinstance(whole, DTensor):
        return Range(kind, name, 0, whole.view(-1), whole.shape, everywhere=True)
    if list(whole.placements) != [Shard(0)]:
        raise RunFailed(
            f"{name} is laid out as {whole.placements}; only rows over one dimension can be saved."
        )
    ranks, rank = whole.device_mesh.size(), whole.device_mesh.get_local_rank()
    rows = -(-whole.shape[0] // ranks)  # as torch.chunk deals them out
    per_row = whole.numel() // max(whole.shape[0], 1)
    start = min(rank * rows, whole.shape[0]) * per_row
    return Range(kind, name, start, whole.to_local().view(-1), whole.shape, everywhere=False)


def _laid_out_as(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """A state tensor: spread like its parameter where it has its shape."""
    if saved.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device)
