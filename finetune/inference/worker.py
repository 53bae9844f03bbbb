"""One process of an evaluation that several share: `python -m finetune.inference.worker FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from finetune.distributed.outer import LAUNCHER_PREFIXES
from finetune.distributed.world import current_world
from finetune.inference.measure import Job, measure
from finetune.paths import RunDir
from finetune.training.process import run_process


def run(folder: RunDir) -> int:
    """Measure this process's rows; the processes never speak to each other."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        del os.environ[name]
    job, world = Job.load(folder.path), current_world()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # libraries would look for the others
    if job.weights.device == "cuda":
        torch.cuda.set_device(world.local_rank)
    measure(job, folder.path, world.rank, world.size)
    return 0


if __name__ == "__main__":
    run_process(RunDir(Path(sys.argv[1])), run)
