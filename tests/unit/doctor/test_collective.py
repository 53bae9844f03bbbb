"""How fast an exchange was, in the words of nccl-tests, and whether it came to the right numbers."""

from __future__ import annotations

import pytest

from finetune.doctor.collective import ROUNDS, WARM_UPS, Exchange, bus_bytes_s, seconds_of, sum_of_all
from finetune.doctor.sizes import GB, GIB, MIB, gb_text, memory_text


@pytest.mark.parametrize(
    ("name", "processes", "gb_s"),
    # 1 GiB in 10 ms: 107.4 GB/s as nccl-tests' algorithm bandwidth
    [
        ("all-reduce", 2, 107.37),
        ("all-reduce", 8, 187.90),
        ("all-gather", 8, 93.95),
        ("reduce-scatter", 4, 80.53),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, processes: int, gb_s: float) -> None:
    assert bus_bytes_s(Exchange(name, GIB, 0.010, ROUNDS, True), processes) / GB == pytest.approx(
        gb_s, abs=0.01
    )


def test_sizes_are_told_in_round_numbers() -> None:
    told = {MIB: "1 MiB", 64 * MIB: "64 MiB", GIB: "1 GiB", GIB - 4: "1 GiB", 40448 * MIB: "39.5 GiB"}
    assert {size: memory_text(size) for size in told} == told
    assert (gb_text(16.38 * GB), gb_text(250e6)) == ("16.4 GB", "250.0 MB")


@pytest.mark.parametrize(("processes", "total"), [(2, 3), (8, 36), (9, 37), (56, 252)])
def test_a_sum_is_compared_exactly_where_bfloat16_can_hold_it(processes: int, total: int) -> None:
    assert sum_of_all(processes) == (total, 0.0)


def test_a_sum_that_bfloat16_cannot_hold_is_compared_roughly() -> None:
    assert sum_of_all(64) == (288, pytest.approx(2.88))


def test_a_slow_round_is_the_measurement_and_all_ranks_decide_alike() -> None:
    rounds: list[int] = []
    assert seconds_of(lambda: rounds.append(1), "cpu", lambda own: own + 5)[1] == 1  # another rank was slow
    assert len(rounds) == 1
    rounds.clear()
    assert seconds_of(lambda: rounds.append(1), "cpu")[1] == ROUNDS
    assert len(rounds) == WARM_UPS + ROUNDS
