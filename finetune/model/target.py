"""Where a merged model is written, in which dtype, and whether there is room for it; without torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from finetune.errors import Problem
from finetune.model.source import BYTES, Source, stored_bytes

SPARE_BYTES = 50 * 10**6
"""For tokenizer, configs and the file system's own needs."""


def find_target(
    source: Source | None, to: str | None, dtype: str | None, problems: list[Problem]
) -> Path | None:
    """The folder to be: `to`, else inside the run, else beside the folder; None while there is no source."""
    if dtype is not None and dtype not in BYTES:
        problems.append(Problem(f"--dtype {dtype}", "no such dtype", f"Known: {', '.join(BYTES)}."))
    if to is not None:
        target = Path(to).expanduser().absolute()
    elif source is not None:
        target = _default(source)
    else:
        return None
    if target.exists() or target.is_symlink():
        problems.append(Problem(str(target), "it exists, and nothing is ever overwritten", "Use --to DIR."))
    held = next(folder for folder in target.parents if folder.exists())
    if not held.is_dir() or not os.access(held, os.W_OK | os.X_OK):
        problems.append(Problem(str(target), f"{held} cannot be written to", "Use --to DIR."))
    elif source is not None:
        needed, free = stored_bytes(source, dtype) + SPARE_BYTES, shutil.disk_usage(held).free
        if needed > free:
            why = (
                f"the merged model takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there"
            )
            problems.append(Problem(str(target), why, "Make room, or use --to DIR on another disk."))
    return target


def _default(source: Source) -> Path:
    if source.run is None:
        return source.folder.with_name(f"{source.folder.name}-merged")
    if source.folder == source.run.model:
        return source.run.path / "merged"
    return source.run.path / f"merged-{source.folder.name}"
