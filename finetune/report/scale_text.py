"""The points of `finetune scale` on a terminal: a table of 80 columns, and bars of tokens per second."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

BAR = 34
COLUMNS = ("run", "thr.", "s/step", "half within", "tok/s", "times", "eff.", "comm", "rows", "GB")
MEANING = """\
thr.: threads of the CPU, each process. half within: half of the steps took so long.
times: speed-up in tok/s; eff.: of what so many processes could give. comm: part of a step in
which processes exchanged, or waited for each other, and computed nothing beside it. rows:
part of a step until its rows were there. GB: the most memory that one process took."""


def scale_lines(record: dict[str, Any], columns: int = 80) -> list[str]:
    """Table, what its columns mean, bars, verdict."""
    points = record["points"]
    if not points:
        return record["verdict"].splitlines()
    out = StringIO()
    console = Console(file=out, width=columns, force_jupyter=False, no_color=True, highlight=False)
    console.print(_table(points))
    console.print(" ".join(MEANING.split()))
    console.print()
    for line in bars(points):
        console.print(line)
    console.print()
    for line in record["verdict"].splitlines():
        console.print(line, markup=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def bars(points: list[dict[str, Any]]) -> list[str]:
    """Tokens per second, the fastest filling the line."""
    most = max(point["tokens_per_second"] for point in points)
    width = max(len(name_of(point)) for point in points)
    return [
        f"{name_of(point):<{width}}  {'#' * max(round(BAR * point['tokens_per_second'] / most), 1):<{BAR}}  "
        f"{point['tokens_per_second']:>9,.0f} tokens/s"
        for point in points
    ]


def name_of(point: dict[str, Any]) -> str:
    """`2 x ddp`."""
    return f"{point['num_processes']} x {point['strategy']}"


def _table(points: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
    for point in points:
        lower, upper = point["step_seconds_spread"]
        table.add_row(
            name_of(point),
            str(point["threads_per_process"]),
            f"{point['step_seconds']:.3g}",
            f"{lower:.3g}-{upper:.3g}",
            f"{point['tokens_per_second']:,.0f}",
            f"{point['speedup']:.2f}",
            f"{point['efficiency']:.0%}",
            f"{point['communication_share']:.0%}",
            f"{point['data_share']:.0%}",
            f"{point['peak_bytes'] / 1e9:.1f}",
        )
    return table
