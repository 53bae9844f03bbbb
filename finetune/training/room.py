"""Is there room on the disk for what a run will save? Told before anything expensive, and exactly behind the
first step.
"""

from __future__ import annotations

import shutil

from finetune.config.rules import RunFacts
from finetune.config.schema import CheckpointConfig, Method, RunConfig
from finetune.errors import Refusal, refuse
from finetune.model.source import BYTES, model_folder
from finetune.paths import RunDir
from finetune.planner.read_shape import stored_parameters
from finetune.training.checkpoint import numbered

COPIES = 3
"""The weights and the two moments of AdamW, which most optimizers keep."""

ADAMW = ("adamw_torch", "adamw_torch_fused")


def refuse_small_disk(config: RunConfig, facts: RunFacts, run_dir: RunDir) -> None:
    """Refuse a full fine-tuning whose checkpoints cannot fit, by the sizes in the model's own files.

    An adapter's are small; they are looked at behind the first step.
    """
    if config.adapter.method is not Method.full or config.trainer.optim not in (None, *ADAMW):
        return
    size = stored_parameters(model_folder(config.model)) * COPIES * BYTES[facts.trained_dtype]
    lacking = too_small(config.checkpoint, run_dir, size)
    if lacking is not None:
        raise lacking


def checkpoints_at_once(checkpoint: CheckpointConfig) -> int:
    """How many lie beside each other at most: those that are kept, the best one, one that is being sent (it
    stays until it has arrived), and the one that is being written.
    """
    return checkpoint.keep + (checkpoint.best is not None) + (checkpoint.remote is not None) + 1


def too_small(checkpoint: CheckpointConfig, run_dir: RunDir, size: int) -> Refusal | None:
    """The refusal of a run whose checkpoints of `size` bytes do not fit beside each other."""
    there = min(len(numbered(run_dir.checkpoints)), checkpoint.keep + (checkpoint.best is not None))
    copies = checkpoints_at_once(checkpoint) - there
    free = shutil.disk_usage(run_dir.checkpoints).free
    if copies * size <= free:
        return None
    best = " and the best one" if checkpoint.best is not None else ""
    return refuse(
        str(run_dir.checkpoints),
        f"{free / 1e9:,.3f} GB are free, and {copies} checkpoints of {size / 1e9:,.3f} GB will be there at "
        f"once: checkpoint.keep={checkpoint.keep}{best}, and a new one before an old one goes",
        "Free space, set output_dir to a larger disk, or lower checkpoint.keep.",
        subject="the disk",
    )
