"""How sure is a figure? Values over rows with the interval that holds the true one in 95 of 100 cases.

Rows are drawn independently, their tokens are not: so a row counts once, however many tokens it has. Loss and
token accuracy are ratios of two sums over rows, with the normal approximation by linearisation (Cochran,
Sampling Techniques, chapter 6); shares of right answers have Wilson's interval, which holds near 0 and 1 too.
Figures are read in blocks, in the order of the rows, so that they are the same however the work was shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054
"""Standard errors that 95 of 100 normal values lie within."""
BLOCK = 1_000_000

METHOD = (
    "95 %; normal approximation over rows, for right answers Wilson's and (tuned - base) Agresti and Min's"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, and the interval around it; null: one row says nothing of another."""

    value: float
    interval: tuple[float, float] | None

    def as_dict(self) -> dict[str, object]:
        return {"value": self.value, "interval": list(self.interval) if self.interval else None}


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    """Sum of the one over the sum of the other, both one value a row."""
    rows, total = len(denominators), _sum(denominators)
    value = _sum(numerators) / total
    if rows < 2:
        return Estimate(value, None)
    squares = 0.0
    for start in range(0, rows, BLOCK):
        part = slice(start, start + BLOCK)
        residuals = np.asarray(numerators[part]) - value * np.asarray(denominators[part])
        squares += float(np.dot(residuals, residuals))
    half = Z * math.sqrt(squares * rows / (rows - 1)) / total
    return Estimate(value, (value - half, value + half))


def mean(values: np.ndarray) -> Estimate:
    """The mean of one value a row."""
    return ratio(values, np.ones(len(values)))


def share(right: float, rows: int) -> Estimate:
    """A share of rows, by Wilson's interval."""
    value, squared = right / rows, Z * Z
    middle = (right + squared / 2) / (rows + squared)
    half = Z / (rows + squared) * math.sqrt(right * (rows - right) / rows + squared / 4)
    return Estimate(value, (middle - half if right else 0.0, middle + half if right < rows else 1.0))


def worth(values: np.ndarray) -> Estimate:
    """What answers are worth on average: a share where each is right or wrong, else a mean."""
    if np.isin(values, (0.0, 1.0)).all():
        return share(float(values.sum()), len(values))
    return mean(values)


def gain(differences: np.ndarray) -> Estimate:
    """What answers are worth more on average, row by row.

    Where each is right or wrong, by Agresti and Min (Statistics in Medicine 24, 2005): half a row is added to
    each of the four cells, so that a few rows which all changed alike do not pass for certain.
    """
    rows = len(differences)
    if not np.isin(differences, (-1.0, 0.0, 1.0)).all():
        return mean(differences)
    better = (float((differences == 1).sum()) + 0.5) / (rows + 2)
    worse = (float((differences == -1).sum()) + 0.5) / (rows + 2)
    middle = better - worse
    half = Z * math.sqrt((better + worse - middle * middle) / (rows + 2))
    return Estimate(float(differences.mean()), (max(-1.0, middle - half), min(1.0, middle + half)))


def _sum(values: np.ndarray) -> float:
    return math.fsum(float(np.sum(values[start : start + BLOCK])) for start in range(0, len(values), BLOCK))
