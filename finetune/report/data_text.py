"""Prepared data on a terminal: lengths as bars, samples with the learnt text marked."""

from __future__ import annotations

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
    start, stop = (GREEN, END) if colour else ("{+", "+}")
    lines = []
    for sample in said["samples"]:
        lines.append(f"{name}: {sample['place']}, learnt text {'in green' if colour else 'in {+ +}'}")
        row, width = "", 0
        for piece in sample["pieces"]:
            row += start if piece["supervised"] else ""
            for letter in _shortened(piece["text"]):
                if letter == "\n" or width >= max(columns - 8, 20):
                    lines.append(f"  | {row}{END if colour and piece['supervised'] else ''}")
                    row, width = (start if colour and piece["supervised"] else ""), 0
                if letter != "\n":
                    row, width = row + letter, width + 1
            row += stop if piece["supervised"] else ""
        lines += [f"  | {row}"] if width else []
    return lines


def _shortened(text: str) -> str:
    """The two ends of a long text; what would move a terminal's cursor is shown as a code."""
    text = "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text.expandtabs(4))
    if len(text) <= SHOWN_WHOLE:
        return text
    return f"{text[:SHOWN_END]} [... {len(text) - 2 * SHOWN_END:,} characters ...] {text[-SHOWN_END:]}"
