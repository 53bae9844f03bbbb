"""Intervals hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.inference import intervals


def test_an_end_of_wilsons_interval_is_a_share_that_the_rows_are_two_standard_errors_from() -> None:
    for right, rows in [(81, 263), (15, 148), (1, 29), (0, 20), (20, 20)]:
        found = intervals.share(right, rows)
        assert found.interval is not None
        for end in found.interval:
            error = (end * (1 - end) / rows) ** 0.5
            assert abs(found.value - end) == pytest.approx(intervals.Z * error, abs=1e-12)
        assert found.interval[0] < found.interval[1]


def test_a_ratio_is_over_all_tokens_and_one_row_says_nothing_of_another() -> None:
    found = intervals.ratio(np.array([3.0, 30.0]), np.array([1.0, 20.0]))
    assert found.value == pytest.approx(33 / 21)
    assert found.interval is not None
    assert intervals.ratio(np.array([3.0]), np.array([2.0])).interval is None


def test_the_interval_of_a_ratio_holds_the_true_one_in_95_of_100_cases() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        difficulty = random.gamma(4.0, 0.5, 200)  # rows differ: their tokens are not independent
        tokens = random.integers(5, 100, 200).astype(float)
        losses = difficulty * tokens
        low, high = intervals.ratio(losses, tokens).interval or (0.0, 0.0)
        held += low <= 2.0 <= high
    assert 925 <= held <= 970


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    losses, tokens = random.random(1000), random.random(1000) + 1
    whole = intervals.ratio(losses, tokens)
    monkeypatch.setattr(intervals, "BLOCK", 7)
    pieces = intervals.ratio(losses, tokens)
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    assert pieces.interval == pytest.approx(whole.interval, rel=1e-12)


def test_what_is_right_or_wrong_is_a_share_and_anything_else_a_mean() -> None:
    assert intervals.worth(np.array([0.0, 1.0, 1.0, 1.0])) == intervals.share(3.0, 4)
    assert intervals.worth(np.array([0.5, 1.0])) == intervals.mean(np.array([0.5, 1.0]))


def test_a_few_rows_that_all_changed_alike_are_not_certain() -> None:
    low, high = intervals.gain(np.array([1.0, 1.0])).interval or (1.0, 1.0)
    assert low < 0 < high == 1.0
    assert intervals.gain(np.array([0.5, 0.0])) == intervals.mean(np.array([0.5, 0.0]))


def test_the_interval_of_a_gain_holds_the_true_one_in_95_of_100_cases() -> None:
    random = np.random.default_rng(2)
    held = 0
    for _ in range(1000):
        changes = random.choice([-1.0, 0.0, 1.0], size=60, p=[0.1, 0.6, 0.3])
        low, high = intervals.gain(changes).interval or (0.0, 0.0)
        held += low <= 0.2 <= high
    assert 925 <= held <= 975
