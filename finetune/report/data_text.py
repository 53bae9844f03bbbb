"""Prepared data on a terminal: lengths as bars, samples with the learnt text marked."""

from __future__ import annotations

import textwrap
from typing import Any

GREEN, END = "\033[32m", "\033[0m"
BAR = 40
START, STOP = "\x01", "\x02"
SHOWN_WHOLE, SHOWN_END = 800, 300
"""A piece of a sample of more characters is shown by its two ends."""


def length_lines(name: str, said: dict[str, Any]) -> list[str]:
    """A histogram of the rows' lengths in tokens."""
    bars = said["lengths"]
    most = max(bar["rows"] for bar in bars)
    width = len(f"{bars[-1]['below'] - 1:,}")
    lines = [f"{name}: rows by length in tokens"]
    first = next(place for place, bar in enumerate(bars) if bar["rows"])
    for bar in bars[first:]:
        lengths = f"{bar['from']:>{width},} - {bar['below'] - 1:>{width},}"
        drawn = "#" * max(round(BAR * bar["rows"] / most), bar["rows"] > 0)
        lines.append(f"  {lengths}  {bar['rows']:>9,}  {drawn}".rstrip())
    return lines


def longest_lines(name: str, said: dict[str, Any]) -> list[str]:
    """The longest rows before cutting, and where they are."""
    rows = [f"  {row['tokens']:>9,}  {row['place']}" for row in said["longest_rows"]]
    return [f"{name}: longest rows in tokens", *rows]


def sample_lines(name: str, said: dict[str, Any], *, colour: bool, columns: int) -> list[str]:
    """The first rows; learnt text is green, or stands in {+ +} where there is no colour."""
    start, stop = (GREEN, END) if colour else ("{+", "+}")
    lines = []
    for sample in said["samples"]:
        lines.append(f"{name}: {sample['place']}, learnt text {'in green' if colour else 'in {+ +}'}")
        text = "".join(
            f"{START}{_shortened(piece['text'])}{STOP}" if piece["supervised"] else _shortened(piece["text"])
            for piece in sample["pieces"]
        )
        learnt = False
        for line in text.splitlines():
            for part in textwrap.wrap(line, columns - 8, drop_whitespace=False) or [""]:
                opened = START if learnt and colour else ""
                learnt = max(part.rfind(START), -1 + learnt) > part.rfind(STOP)
                closed = STOP if learnt and colour else ""
                shown = f"{opened}{part}{closed}".replace(START, start).replace(STOP, stop)
                lines.append(f"  | {shown}")
    return lines


def _shortened(text: str) -> str:
    text = text.replace(START, " ").replace(STOP, " ")
    if len(text) <= SHOWN_WHOLE:
        return text
    return f"{text[:SHOWN_END]} [... {len(text) - 2 * SHOWN_END:,} characters ...] {text[-SHOWN_END:]}"
