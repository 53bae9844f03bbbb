"""Which rows share one packed row: best fit, longest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put rows, given by their lengths, into as few bins of `capacity` tokens as best-fit-decreasing finds.

    Each row goes to the fullest bin that still has room for it. Returns the rows of each bin; the same
    lengths always give the same bins.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and (int(sizes.max()) > capacity or int(sizes.min()) < 1):
        raise AssertionError(
            f"rows of {sizes.min()} to {sizes.max()} tokens cannot be packed into {capacity}"
        )
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: a bin with exactly r tokens of room is open; the lowest fitting bit is the best fit
    for row in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[row])
        fitting = rooms >> size
        if fitting:
            room = (fitting & -fitting).bit_length() - 1 + size
            open_bins = by_room[room]
            chosen = open_bins.pop()
            if not open_bins:
                rooms &= ~(1 << room)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(row)
        left = room - size
        if left:
            by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins
