"""How many CPU cores this process may use. Needs the standard library alone."""

from __future__ import annotations

import os

from finetune.hardware.cgroup import cpu_limit


def usable_cores() -> float:
    """Those that it may run on, or the container's share where that is less: it may be a fraction."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit()
    return float(cores) if limit is None else min(float(cores), limit)


def whole_cores() -> int:
    """The same in whole cores, one at least."""
    return max(1, int(usable_cores()))
