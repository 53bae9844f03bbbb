"""Packing loses no row, overfills no bin, and always gives the same bins."""

from __future__ import annotations

import random

import pytest

from finetune.data.pack import pack


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_in_one_bin_that_holds_it(seed: int) -> None:
    lengths = random.Random(seed).choices(range(1, 101), k=500)
    bins = pack(lengths, 100)
    assert sorted(row for rows in bins for row in rows) == list(range(500))
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= 100


def test_row_goes_to_the_fullest_bin_with_room() -> None:
    assert pack([6, 5, 3, 4], 10) == [[0, 3], [1, 2]]


def test_no_two_bins_fit_into_one() -> None:
    lengths = random.Random(3).choices(range(1, 60), k=400)
    filled = sorted(sum(lengths[row] for row in rows) for rows in pack(lengths, 100))
    assert filled[0] + filled[1] > 100


def test_same_lengths_give_the_same_bins() -> None:
    lengths = random.Random(4).choices(range(1, 60), k=400)
    assert pack(lengths, 100) == pack(list(lengths), 100)


def test_nothing_to_pack_gives_nothing() -> None:
    assert pack([], 10) == []
