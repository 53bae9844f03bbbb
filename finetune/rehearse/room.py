"""Is there room for a rehearsal on the disk that it takes place on? Told before a process of it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.errors import UserError
from finetune.rehearse.twin_config import CHECKPOINT_STEP, STEPS

LEAST_BYTES = 100 * 10**6
"""For a twin of next to no size: a rehearsal under zero3 was seen to take 20 MB, the merge asks for 50 MB
beside its model, and DeepSpeed may compile meanwhile.
"""
COPIES = 4
"""Of all weights: the twin, the run's model/, the merged model, and one that is being written."""
WEIGHT_BYTES = 4
"""At most: float32."""
CHECKPOINTS = 2 * (STEPS // CHECKPOINT_STEP) - 1
"""All of the resumed run, and those of the killed one behind its first, which are moved aside."""
STATE_BYTES = 16
"""For each trained parameter in a checkpoint, at most: float32 masters, AdamW's two moments, the weights."""


class NoRoom(UserError):
    """The disk is too small for a rehearsal."""


def needed_bytes(parameters: int, *, all_trained: bool) -> int:
    """What a rehearsal of a twin takes at most; adapters, which are small, count among `LEAST_BYTES`."""
    state = CHECKPOINTS * STATE_BYTES if all_trained else 0
    return LEAST_BYTES + parameters * (COPIES * WEIGHT_BYTES + state)


def refuse_small_room(folder: Path, needed: int) -> None:
    """Refuse a disk that does not take `needed` bytes; `folder` is the rehearsal's own.

    Raises:
        NoRoom: how much is needed, and how much there is.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoom(
            f"the rehearsal needs about {needed / 1e6:,.0f} MB in TMPDIR ({folder.parent}), and "
            f"{free / 1e6:,.0f} MB are free there: set TMPDIR to a folder on another disk"
        )
