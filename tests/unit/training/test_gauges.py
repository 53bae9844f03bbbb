"""What a rank measures of itself, and what is made of the figures of all ranks."""

from __future__ import annotations

import time

import pytest
import torch

from finetune.training.gauges import OwnTime, flops_share, side_by_side


class Slow(torch.nn.Module):
    def forward(self, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return torch.zeros(1)


def test_only_forward_passes_of_training_are_a_ranks_own_time() -> None:
    model = Slow()
    own = OwnTime(model, torch.device("cpu"), compiled=False)
    model(0.05)
    model(0.05)
    model.eval()
    model(0.3)
    assert 0.1 <= own.since_last() < 0.3
    assert own.since_last() == 0


def test_the_rank_that_was_busy_longest_is_named() -> None:
    ranks: list[dict[str, float | int]] = [
        {"rank_seconds": 0.5, "memory_resident_bytes": 10},
        {"rank_seconds": 0.9, "memory_resident_bytes": 20},
    ]
    assert side_by_side(ranks) == {
        "rank_seconds": [0.5, 0.9],
        "memory_resident_bytes": [10, 20],
        "slowest_rank": 1,
    }
    assert "slowest_rank" not in side_by_side(ranks[:1])


def test_what_one_card_does_not_tell_is_told_of_none() -> None:
    told = side_by_side([{"rank_seconds": 1.0, "gpu_watts": 300.0}, {"rank_seconds": 1.0}])
    assert "gpu_watts" not in told


def test_model_flops_are_those_of_the_documents_that_were_read() -> None:
    flops = {"token": 6e9, "position": 1e5, "window": None, "peak": 100e12}
    forecast = {"flops": flops}
    assert flops_share(forecast, 10_000, 2000, 2) == pytest.approx(10_000 * (6e9 + 1e5 * 1000) / 200e12)
    windowed = {"flops": {**flops, "window": 100}}
    assert flops_share(windowed, 10_000, 2000, 2) == pytest.approx(10_000 * (6e9 + 1e5 * 50) / 200e12)
    assert flops_share({"flops": {**flops, "peak": None}}, 10_000, 2000, 2) is None
    assert flops_share(None, 10_000, 2000, 2) is None
