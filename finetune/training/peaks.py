"""The most memory that each phase of a run took in this process: on its card, or in RAM on the CPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

OWN = Path("/proc/self")
RESET = "5"
"""Makes the kernel forget the highest resident size (`proc_pid_clear_refs`, Linux)."""


class Peaks:
    """Peaks between two calls of `end`, the highest of each phase kept.

    CUDA: torch's `max_memory_allocated` and `max_memory_reserved`. CPU: the resident size; where the kernel
    does not let it be reset, a phase has the highest so far.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.phases: dict[str, dict[str, int]] = {}
        self._latest: dict[str, int] = {}

    def end(self, phase: str) -> None:
        """What was taken since the last call belongs to `phase`."""
        before = self.phases.setdefault(phase, {})
        for name, size in self._taken().items():
            before[name] = max(before.get(name, 0), size)
            self._latest[name] = max(self._latest.get(name, 0), size)

    def latest(self) -> dict[str, int]:
        """Over the phases that ended since this was asked before."""
        latest, self._latest = self._latest, {}
        return latest

    @property
    def highest(self) -> dict[str, int]:
        """Over all phases."""
        names = {name for peaks in self.phases.values() for name in peaks}
        return {name: max(peaks.get(name, 0) for peaks in self.phases.values()) for name in sorted(names)}

    def _taken(self) -> dict[str, int]:
        if self.device == "cuda":
            counted = torch.cuda.memory_stats()  # what max_memory_allocated and _reserved read, each anew
            torch.cuda.reset_peak_memory_stats()
            return {kind: counted.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved")}
        return {"resident": _highest_resident()}


def _highest_resident() -> int:
    """Bytes; the count starts anew behind it."""
    try:
        lines = (OWN / "status").read_text(encoding="utf-8").splitlines()
        size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        (OWN / "clear_refs").write_text(RESET, encoding="utf-8")
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return size
