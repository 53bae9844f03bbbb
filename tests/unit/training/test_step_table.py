"""The columns of the table of steps, on cards too, which no test here has."""

from __future__ import annotations

import pytest

from finetune.training.step_table import COLUMNS, fitting, line

ON_A_CARD = {
    "loss": 1.2345678,
    "grad_norm": 0.98765,
    "learning_rate": 2e-5,
    "speed": 12345.6,
    "mfu": 0.413,
    "memory": 71.2e9,
    "card": 84.9e9,
    "gpu_utilization": [99, 97],
    "gpu_watts": [690.2, 668.0],
    "supervised_tokens": 1234567,
    "left": 3725.0,
}


def test_a_card_fills_every_column() -> None:
    columns = fitting(ON_A_CARD, 200)
    assert columns == list(COLUMNS)
    row = line("1/9", columns, [column.shown(ON_A_CARD) for column in columns])
    said = ["1.2346", "0.988", "2.0e-05", "12,346", "41%", "71.2", "84%", "98%", "679", "1.23M", "1:02:05"]
    assert row.split() == ["1/9", *said]


@pytest.mark.parametrize("steps", [9, 999, 9999999])
def test_80_columns_are_never_overrun_and_the_least_wanted_go_first(steps: int) -> None:
    width = max(2 * len(str(steps)) + 1, 4)
    columns = fitting(ON_A_CARD, 80 - width)
    titles = [column.title for column in columns]
    assert len(line(" " * width, columns, titles)) <= 80
    gone = [column.title for column in COLUMNS if column.title not in titles]
    assert gone == {9: [], 999: ["busy"], 9999999: ["card", "busy", "W"]}[steps]


def test_a_cpu_has_no_columns_of_a_card() -> None:
    known = {name: value for name, value in ON_A_CARD.items() if not name.startswith(("gpu", "mfu", "card"))}
    titles = [column.title for column in fitting(known, 76)]
    assert titles == ["loss", "grad", "rate", "tok/s/dev", "GB", "learnt", "left"]


@pytest.mark.parametrize(
    ("norm", "learnt", "shown"),
    [
        (2, 987, ["2.00", "987"]),
        (1.994, 5000, ["1.99", "5.00k"]),
        (100.2, 10_000, ["100", "10.0k"]),
        (0.000123, 999_499, ["1.2e-04", "999k"]),
        (0.00001234, 999_499, ["1.2e-05", "999k"]),
        (12345.6, 999_500, ["1.2e+04", "1.00M"]),
        (0, 123_456_789, ["0.00", "123M"]),
    ],
)
def test_figures_have_as_many_digits_in_every_line(norm: float, learnt: int, shown: list[str]) -> None:
    row = {**ON_A_CARD, "grad_norm": norm, "supervised_tokens": learnt}
    cells = {column.title: column.shown(row) for column in COLUMNS}
    assert [cells["grad"], cells["learnt"]] == shown


@pytest.mark.parametrize("left", [0.0, 36_000.0, 360_000.0])
@pytest.mark.parametrize("norm", [2.0, 0.00123, 0.000123, 12345.6])
def test_long_figures_stand_apart_below_their_titles(norm: float, left: float) -> None:
    row = {**ON_A_CARD, "grad_norm": norm, "left": left}
    cells = [column.shown(row) for column in COLUMNS]
    told = line("1/9", list(COLUMNS), cells)
    assert told.split() == ["1/9", *cells]
    assert len(told) == len(line("1/9", list(COLUMNS), [column.title for column in COLUMNS]))


def test_a_figure_that_is_too_wide_is_still_parted_from_the_next() -> None:
    row = {**ON_A_CARD, "loss": 123_456.0, "speed": 1e12, "left": 3.6e7}
    cells = [column.shown(row) for column in COLUMNS]
    assert line("1/9", list(COLUMNS), cells).split() == ["1/9", *cells]
