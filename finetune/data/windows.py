"""Which rows make a global batch: the same rows in the same step for any number of processes.

One global order of each epoch is cut into windows of exactly `global_batch_size` rows, and every rank takes
its slice of each window. The epoch's last window is filled up with rows that teach nothing (`FILL`), never
with repeats: with accelerate's own sharding 7 rows in batches of 4 train differently on 1 and on 2 processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

FILL = -1
"""Stands for a row whose labels are all masked."""


class WindowSampler(Sampler[list[int]]):
    """Batches of row indices for one rank; each epoch has its own order.

    Args:
        lengths: tokens of each row; inside a window rows of like length share a batch, which saves padding
        and keeps
            the ranks in step without changing what the optimizer step learns.
        per_device: rows of a batch.
        accumulation: batches of an optimizer step.
        shuffle: False keeps the rows in their own order (evaluation).
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        per_device: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        self.lengths = lengths
        self.per_device = per_device
        self.accumulation = accumulation
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self._drawn: tuple[int, np.ndarray] | None = None

    @property
    def global_batch_size(self) -> int:
        return self.per_device * self.accumulation * self.world_size

    @property
    def windows_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.global_batch_size)

    def __len__(self) -> int:
        return self.windows_per_epoch * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        for start in range(0, len(order), self.global_batch_size):
            yield from self._slices(order[start : start + self.global_batch_size])[self.rank]

    def window(self, step: int) -> np.ndarray:
        """The rows of optimizer step `step` (counted from 0 over all epochs), over all ranks."""
        epoch, position = divmod(step, self.windows_per_epoch)
        start = position * self.global_batch_size
        return self._order(epoch)[start : start + self.global_batch_size]

    def rank_rows(self, step: int) -> list[int]:
        """The rows that this rank sees in optimizer step `step`, without the filling."""
        return [row for batch in self._slices(self.window(step))[self.rank] for row in batch if row != FILL]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.lengths))
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        return self._drawn[1]

    def _slices(self, window: np.ndarray) -> list[list[list[int]]]:
        """Deal a window to ranks, longest rows first: `[rank][batch][row]`."""
        by_length = window[np.argsort(-self.lengths[window], kind="stable")]
        filled = np.full(self.global_batch_size, FILL, dtype=np.int64)
        filled[: len(by_length)] = by_length
        dealt = filled.reshape(self.accumulation, self.per_device, self.world_size)
        return dealt.transpose(2, 0, 1).tolist()
