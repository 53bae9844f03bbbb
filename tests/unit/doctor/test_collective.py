"""How fast an exchange was, in the words of nccl-tests."""

from __future__ import annotations

import pytest

from finetune.doctor.collective import Exchange, bus_bytes_s, size_text
from finetune.hardware.machine import GB

GIB, MIB = 2**30, 2**20


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
    assert bus_bytes_s(Exchange(name, GIB, 0.010, True), processes) / GB == pytest.approx(gb_s, abs=0.01)


def test_sizes_are_told_in_round_numbers() -> None:
    sizes = (MIB, 64 * MIB, GIB, GIB - 4)
    assert [size_text(size) for size in sizes] == ["1 MiB", "64 MiB", "1 GiB", "1 GiB"]
