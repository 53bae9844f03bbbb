"""Prepared data on a terminal: lengths as bars, samples with the learnt text marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GREEN, END = "\033[32m", "\033[0m"
BAR = 40
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
    lines = []
    for sample in said["samples"]:
        lines.append(f"{name}: {sample['place']}, learnt text {'in green' if colour else 'in {+ +}'}")
        pieces = [(_shortened(piece["text"]), piece["supervised"]) for piece in sample["pieces"]]
        learnt = [supervised for text, supervised in pieces for _ in text]
        start = 0
        for row in _rows("".join(text for text, _ in pieces), max(columns - 8, 20)):
            lines.append(f"  | {_marked(row, start, learnt, colour=colour)}")
            start += len(row)
    return lines


def _rows(text: str, width: int) -> Iterator[str]:
    """All of the text in lines: a long one is broken behind a space, or, where there is none, in a word."""
    for line in text.splitlines(keepends=True):
        while len(line.rstrip("\n")) > width:
            end = line.rfind(" ", 0, width) + 1 or width
            yield line[:end]
            line = line[end:]
        yield line


def _marked(row: str, start: int, learnt: list[bool], *, colour: bool) -> str:
    """A row of the text, which begins at `start`, with marks where learnt text begins and ends.

    A colour ends with its row.
    """
    begin, end = (GREEN, END) if colour else ("{+", "+}")
    stop = start + len(row)
    shown = ""
    for place, letter in enumerate(row, start):
        first = place == 0 or not learnt[place - 1] or (colour and place == start)
        last = place + 1 == len(learnt) or not learnt[place + 1] or (colour and place + 1 == stop)
        letter = letter.rstrip("\n")
        if learnt[place]:
            letter = f"{begin if first else ''}{letter}{end if last else ''}"
        shown += letter
    return shown


def _shortened(text: str) -> str:
    """The two ends of a long text; what would move a terminal's cursor is shown as a code."""
    text = "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text.expandtabs(4))
    if len(text) <= SHOWN_WHOLE:
        return text
    return f"{text[:SHOWN_END]} [... {len(text) - 2 * SHOWN_END:,} characters ...] {text[-SHOWN_END:]}"
