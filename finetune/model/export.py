"""Writes what the user takes away, from any sharding, one shard at a time.

No process ever holds more than its own share, one decoder layer and one file of weights: every rank joins in
gathering a tensor, rank 0 alone keeps it until the file is full. The Trainer's own `save_model` writes
nothing at all under FSDP with sharded state, assembles the whole model in one process otherwise, and saves a
dtype that depends on the strategy.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, the size that hub checkpoints use."""


@dataclass(slots=True)
class Written:
    """What rank 0 wrote: enough to notice a file that does not hold what was trained."""

    sums: dict[str, float] = field(default_factory=dict)
    """Sum over each tensor (as stored), in float64."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def note(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.sums[name] = checksum(tensor)
            self.shapes[name] = tuple(tensor.shape)


def checksum(tensor: torch.Tensor) -> float:
    """A float64 sum that also depends on the order of the elements, taken in small pieces on the CPU."""
    total = 0.0
    for piece in tensor.detach().reshape(-1).split(251 * 2**14):
        weights = torch.arange(1, piece.numel() + 1, dtype=torch.float64).remainder_(251.0)
        total += float(torch.dot(piece.cpu().double(), weights))
    return total


def save_full(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    is_main: bool,
    groups: Iterable[dict[str, torch.Tensor]] | None = None,
) -> Written:
    """Write every weight of `model` under the checkpoint's own names. All ranks call it; rank 0 writes.

    `groups` are its tensors layer by layer, for a model whose weights are made on the way.
    """
    reshard(model)
    written, shards = Written(), _Shards(folder)
    for group in groups or _groups(model):
        gathered = {name: _gather(tensor, dtype, is_main) for name, tensor in group.items()}
        if not is_main:
            continue
        original = revert_weight_conversion(model, gathered)
        original = {name: tensor.contiguous() for name, tensor in original.items()}
        written.note(original)
        shards.add(original)
    if is_main:
        shards.finish()
        _save_configs(model, folder, dtype)
    return written


def save_adapter(model: PeftModel, folder: Path, dtype: torch.dtype, is_main: bool) -> Written:
    """Write the adapter alone. All ranks call it; rank 0 writes."""
    reshard(model)
    written = Written()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gathered = {name: _gather(tensor, dtype, is_main) for name, tensor in trained.items()}
    if is_main:
        # embeddings that are trained are in `modules_to_save`, and not to be saved a second time when resized
        tensors = get_peft_model_state_dict(
            model,
            state_dict={n: t for n, t in gathered.items() if t is not None},
            save_embedding_layers=False,
        )
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        written.note(tensors)
        config = model.peft_config["default"]
        trained_for_inference, config.inference_mode = config.inference_mode, True
        config.save_pretrained(str(folder))
        config.inference_mode = trained_for_inference
    return written


def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one file of weights, readable like any other file: safetensors makes it the owner's alone."""
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def save_words(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path, turn_end: int
) -> None:
    """Write tokenizer, chat template and a generation config that stops where the training data stopped."""
    tokenizer.save_pretrained(folder)
    generation = model.generation_config
    stops = generation.eos_token_id if generation.eos_token_id is not None else []
    stops = [stops] if isinstance(stops, int) else list(stops)
    ends = [turn_end, *(token for token in [*stops, tokenizer.eos_token_id] if token is not None)]
    generation.eos_token_id = list(dict.fromkeys(ends))
    generation.pad_token_id = tokenizer.pad_token_id
    generation.save_pretrained(folder)


def reshard(model: torch.nn.Module) -> None:
    """Give FSDP2 its own tensors back: a forward pass without gradients may leave the weights gathered, in
    the dtype of the computation.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _groups(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """The model's tensors, tied ones once, layer by layer: what a weight conversion needs stays together."""
    for _, tensors in groupby(plain_tensors(model), key=lambda named: layer_of(named[0])):
        yield dict(tensors)


def plain_tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Parameters and what else is saved of a model, tied tensors once."""
    buffers = ((name, tensor) for name, tensor in model.named_buffers() if _is_persistent(model, name))
    return [*model.named_parameters(), *buffers]


def layer_of(name: str) -> str:
    """The part of a name up to its first number: `model.layers.3.mlp.gate.weight` -> `model.layers.3`."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return name


def _is_persistent(model: torch.nn.Module, name: str) -> bool:
    owner, _, buffer = name.rpartition(".")
    return buffer not in model.get_submodule(owner)._non_persistent_buffers_set


def _gather(tensor: torch.Tensor, dtype: torch.dtype, keep: bool) -> torch.Tensor | None:
    """The whole tensor as it is stored, on the CPU of rank 0: from a DTensor (FSDP2), a ZeRO-3 partition, or
    a plain one.
    """
    with _zero3_gathered(tensor):
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        stored = dtype if whole.is_floating_point() else whole.dtype
        return whole.to("cpu", stored, copy=True) if keep else None


def _zero3_gathered(tensor: torch.Tensor) -> AbstractContextManager[None]:
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor])


class _Shards:
    """Files of weights, each written when it is full and named when their number is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer: dict[str, torch.Tensor] = {}
        self.buffered_bytes = 0
        self.total_bytes = 0
        self.files: list[list[str]] = []

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if self.buffer and self.buffered_bytes + tensor.nbytes > SHARD_BYTES:
                self._flush()
            self.buffer[name] = tensor
            self.buffered_bytes += tensor.nbytes
            self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        self._flush()
        count = len(self.files)
        if count == 1:
            self._part(0).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2), encoding="utf-8"
        )

    def _flush(self) -> None:
        save_file(self.buffer, self._part(len(self.files)))
        self.files.append(list(self.buffer))
        self.buffer, self.buffered_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number}.safetensors"


def _save_configs(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    config = model.config
    config.dtype = str(dtype).removeprefix("torch.")
    # FSDP2 renames the class of the model it wraps
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.use_cache = True
    config.save_pretrained(folder)
