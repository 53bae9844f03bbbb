"""What did a run cost: time, hours of devices, and money where a price is known?"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from finetune.report.metrics import number
from finetune.report.reading import Reading, at


@dataclass(frozen=True, slots=True)
class Cost:
    """As far as it can be known; None: it is not."""

    training_seconds: float | None
    seconds: float | None
    """Of the processes, from their start to their end, over all starts of the run."""
    how: str
    """Where `seconds` comes from, in words."""
    devices: int | None
    device: str
    device_hours: float | None
    money: float | None
    currency: str
    no_money: str
    """Why there is no sum; empty when there is one."""

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def cost_of(reading: Reading, now: float | None = None) -> Cost:
    """From the times that the run wrote down; where it could write none, from its logged steps."""
    trained = reading.metrics.training_seconds
    seconds, how = _seconds(reading, trained, time.time() if now is None else now)
    devices = reading.processes
    device = "GPU" if reading.facts.get("device") == "cuda" else "CPU process"
    hours = seconds * devices / 3600 if seconds is not None and devices is not None else None
    hardware = at(reading.config, "hardware")
    price = number(at(hardware, "price_per_hour"))
    money = None
    if price is not None and seconds is not None:
        machines = number(at(reading.config, "launch", "num_machines")) or 1
        minutes = max(seconds / 60, number(at(hardware, "minimum_minutes")) or 0)
        money = minutes / 60 * price * machines
    unset = "hardware.price_per_hour is not set" if reading.config else "config.yaml could not be read"
    why = "" if money is not None else unset if price is None else how
    currency = str(at(hardware, "currency") or "")
    return Cost(trained, seconds, how, devices, device, hours, money, currency, why)


def _seconds(reading: Reading, trained: float | None, now: float) -> tuple[float | None, str]:
    starts = reading.starts
    known = [start.ended - start.started for start in starts if start.ended is not None]
    open_ends = len(starts) - len(known)
    if reading.running:
        known.append(now - starts[-1].started)
        open_ends -= 1
    total = sum(known)
    if starts and not open_ends:
        times = f"{len(starts)} starts" if len(starts) > 1 else "the start"
        so_far = " so far" if reading.status == "running" else ""
        return total, f"from {times} to the end{so_far}, loading the model included"
    if trained is None and not known:
        return None, "its time is not known: neither its start and end nor the speed of a step was written"
    lacking = f"{open_ends} of {len(starts)} starts left no end" if starts else "its start was not written"
    return max(total, trained or 0.0), f"at least: {lacking}"
