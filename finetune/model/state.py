"""The tensors of a checkpoint: flat ranges from every rank that wrote it, read as one.

`state/rank-00001-000.safetensors` holds `KIND/NAME@START` -> the elements from START on of the flattened
tensor; the file's metadata has the whole tensors' shapes. So a range is found whatever the strategy and the
number of ranks that wrote it, and no more than it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.errors import RunFailed

STATE = "state"
"""Folder of the tensors inside a checkpoint."""

WEIGHT, BUFFER = "weight", "buffer"
"""Kinds of tensors; every other kind is the optimizer's own word, such as `exp_avg`."""


class SavedState:
    """The tensors of a checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, torch.Size] = {}
        """`KIND/NAME` -> shape of the whole tensor."""
        self._pieces: dict[str, list[tuple[int, Any]]] = {}
        for file in sorted((folder / STATE).glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            shapes = {key: torch.Size(json.loads(text)) for key, text in (opened.metadata() or {}).items()}
            self.shapes |= shapes
            for stored in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                key, _, start = stored.rpartition("@")
                self._pieces.setdefault(key, []).append((int(start), opened.get_slice(stored)))

    def names(self, kind: str) -> list[str]:
        """The parameters (or buffers) that have a tensor of this kind."""
        return [key.partition("/")[2] for key in self.shapes if key.startswith(f"{kind}/")]

    def like(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameter -> kind of optimizer state -> a tensor on the device `meta` with its shape and dtype."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, shape in self.shapes.items():
            kind, _, name = key.partition("/")
            if kind not in (WEIGHT, BUFFER):
                empty = torch.empty(shape, dtype=self._dtype(key), device="meta")
                found.setdefault(name, {})[kind] = empty
        return found

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """One tensor as it is saved, on the CPU."""
        key = f"{kind}/{name}"
        values = torch.empty(self.shapes[key].numel(), dtype=self._dtype(key))
        self.read(kind, name, self.shapes[key], 0, values)
        return values.view(self.shapes[key])

    def read(self, kind: str, name: str, whole: torch.Size, start: int, into: torch.Tensor) -> None:
        """Copy the elements from `start` on of a flattened tensor into a flat one, cast to its dtype.

        Raises RunFailed where the tensor is another one, or not all of the range is there.
        """
        key = f"{kind}/{name}"
        if self.shapes.get(key) != whole:
            held = f"of shape {list(self.shapes[key])}" if key in self.shapes else "not there"
            needed = f"this run's has the shape {list(whole)}"
            raise RunFailed(f"{self.folder} does not fit this run: {kind} of {name} is {held}; {needed}.")
        end, filled = start + into.numel(), 0
        for at, stored in self._pieces.get(key, []):
            first, last = max(at, start), min(at + stored.get_shape()[0], end)
            if first < last:
                into[first - start : last - start].copy_(stored[first - at : last - at])
                filled += last - first
        if filled != into.numel():
            raise RunFailed(f"{self.folder} holds {filled:,} of {into.numel():,} values of {key}.")

    def _dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._pieces[key][0][1][:0].dtype
        return dtype
