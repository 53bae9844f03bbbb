"""Computes a model in float32 without holding it so: weights stay as stored, and are widened while used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from finetune.errors import RunFailed

NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: torch.nn.Module, *, merged: bool = False) -> Iterator[None]:
    """Inside, every operation is one in float32; with `merged`, every adapter layer is merged for its turn.

    Merging into a float32 copy of one layer at a time is what the written weights are, before they are
    rounded to their dtype.
    """
    hooks: list[Any] = []
    for module in model.modules():
        # peft rounds the update of a stacked parameter (experts) to that parameter's dtype
        if isinstance(module, ParamWrapper) or (merged and isinstance(module, BaseTunerLayer)):
            hooks += _widened_while_used(module, merged)
    try:
        with torch.no_grad(), _InFloat32():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def merge_in_float32(tuner: BaseTunerLayer) -> None:
    """peft's own merge of one layer, on a float32 copy of its base weights."""
    for parameter in tuner.get_base_layer().parameters(recurse=False):
        parameter.data = parameter.data.float()
    tuner.merge(safe_merge=True)
    if not tuner.merged:
        raise RunFailed(f"peft did not merge a layer of the kind {type(tuner).__name__}")


_SAME_STORAGE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""What `.data` comes down to: no computation, and the stored tensor itself is meant."""


class _InFloat32(TorchDispatchMode):
    """Each narrow tensor is widened for the one operation that reads it, and nothing becomes narrow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME_STORAGE:
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:  # rows are picked before they are widened
            return func(*args, **kwargs).float()
        if not func._schema.is_mutable:
            args, kwargs = tree_map_only(torch.Tensor, _widen, (args, kwargs))
        if kwargs.get("dtype") in NARROW:  # a layer casts to its weights' dtype (GPT-OSS's experts)
            kwargs = kwargs | {"dtype": torch.float32}
        return func(*args, **kwargs)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in NARROW else tensor


def _widened_while_used(tuner: Any, merged: bool) -> list[Any]:
    stored: list[list[torch.Tensor]] = []
    weights = list(tuner.get_base_layer().parameters(recurse=False))

    def before(module: Any, args: Any) -> None:
        stored.append([weight.data for weight in weights])
        if merged:
            merge_in_float32(tuner)
        else:
            for weight in weights:
                weight.data = weight.data.float()

    def after(module: Any, args: Any, result: Any) -> None:
        for weight, data in zip(weights, stored.pop(), strict=True):
            weight.data = data
        tuner.merged_adapters.clear()

    return [tuner.register_forward_pre_hook(before), tuner.register_forward_hook(after)]
