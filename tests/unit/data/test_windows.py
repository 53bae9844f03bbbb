"""The sampler: the same rows in the same step for any number of processes, and never a repeat."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.windows import FILL, WindowSampler


def sampler(
    rows: int, per_device: int, accumulation: int, rank: int, world: int, **more: object
) -> WindowSampler:
    lengths = np.random.default_rng(0).integers(1, 50, rows)
    return WindowSampler(
        lengths,
        per_device=per_device,
        accumulation=accumulation,
        rank=rank,
        world_size=world,
        seed=3,
        **more,  # type: ignore[arg-type]
    )


def steps(rows: int, per_device: int, accumulation: int, world: int, epoch: int = 0) -> list[list[int]]:
    """The rows of each optimizer step over all ranks, filling included."""
    ranks = []
    for rank in range(world):
        one = sampler(rows, per_device, accumulation, rank, world)
        one.set_epoch(epoch)
        ranks.append(list(one))
    assert {len(batches) for batches in ranks} == {
        -(-rows // (per_device * accumulation * world)) * accumulation
    }
    return [
        sorted(row for batches in ranks for batch in batches[start : start + accumulation] for row in batch)
        for start in range(0, len(ranks[0]), accumulation)
    ]


@given(
    rows=st.integers(1, 60),
    per_device=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
)
def test_every_row_once_and_the_rest_is_filling(
    rows: int, per_device: int, accumulation: int, world: int
) -> None:
    seen = [row for step in steps(rows, per_device, accumulation, world) for row in step]
    assert sorted(row for row in seen if row != FILL) == list(range(rows))
    size = per_device * accumulation * world
    assert seen.count(FILL) == -(-rows // size) * size - rows


def test_the_split_over_processes_does_not_change_a_step() -> None:
    expected = steps(29, 8, 1, 1)
    for per_device, accumulation, world in [(4, 2, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8), (2, 1, 4)]:
        assert steps(29, per_device, accumulation, world) == expected


def test_each_epoch_has_its_own_order() -> None:
    assert steps(32, 4, 1, 1, epoch=0) != steps(32, 4, 1, 1, epoch=1)
    assert steps(32, 4, 1, 1, epoch=1) == steps(32, 2, 1, 2, epoch=1)


def test_rows_of_like_length_share_a_batch() -> None:
    one = sampler(64, 4, 4, 0, 1)
    batches = list(one)[:4]
    spread = [np.ptp(one.lengths[batch]) for batch in batches]
    window = one.lengths[[row for batch in batches for row in batch]]
    assert max(spread) < np.ptp(window) / 2


def test_window_and_rank_rows_say_what_the_iteration_does() -> None:
    ranks = [sampler(30, 2, 2, rank, 2) for rank in (0, 1)]
    first_epoch = [list(one) for one in ranks]
    for step in range(4):
        dealt = [
            sorted(row for batch in batches[2 * step : 2 * step + 2] for row in batch if row != FILL)
            for batches in first_epoch
        ]
        assert [sorted(one.rank_rows(step)) for one in ranks] == dealt
        assert sorted(ranks[0].window(step).tolist()) == sorted(dealt[0] + dealt[1])


def test_evaluation_keeps_the_order_of_the_file() -> None:
    assert sorted(row for batch in sampler(8, 4, 1, 0, 1, shuffle=False) for row in batch) == list(range(8))
    first = next(iter(sampler(8, 4, 1, 0, 1, shuffle=False)))
    assert sorted(first) == [0, 1, 2, 3]
