"""Checkpoints that are whole or not there: written beside, sealed by a manifest, renamed; old ones last."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from finetune.errors import RunFailed
from finetune.paths import RunDir, write_whole

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NUMBERS = "state.json"
"""Everything of optimizer and schedule that is no tensor."""
PART, ASIDE, REPLACED = ".part", ".aside-", ".replaced-"
"""Beside the checkpoints: where one is being written; how those begin that are no longer wanted, and one
whose place is being taken.
"""
NAME = re.compile(r"checkpoint-(\d+)")
SEAL, FAILED = ".sealed-", ".failed-"
"""How a rank's mark begins that says: my files are on the disk; or: they will not be."""

BLOCK = 2**24


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is whole, and those that were passed over on the way to it."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()


Entry = dict[str, Any]
"""Of a file in the manifest: `bytes`, and `xxh3`, a checksum of 128 bits that finds damage, not forgery."""


def state_file(rank: int, number: int) -> str:
    """Where a rank's tensors lie in a checkpoint."""
    return f"state/rank-{rank:05d}-{number:03d}.safetensors"


def state_files_of(folder: Path, rank: int) -> list[Path]:
    """What a rank has written of its tensors so far, whole or not."""
    return list(folder.glob(f"state/rank-{rank:05d}-*"))


def missing_part(files: Iterable[str], num_processes: int) -> str:
    """Which part of a resumable state is not among the files."""
    names = set(files)
    ranks = range(num_processes)
    parts = {
        "the state of the trainer": "trainer_state.json",
        "the numbers of optimizer and schedule": NUMBERS,
        **{f"the state of rank {rank}": state_file(rank, 0) for rank in ranks},
        **{
            f"the random numbers of rank {rank}": f"rng_state_{rank}.pth"
            if num_processes > 1
            else "rng_state.pth"
            for rank in ranks
        },
    }
    return ", ".join(part for part, name in parts.items() if name not in names)


def entry_of(path: Path) -> Entry:
    """Bring a file to the disk, and look at what is there (not at the copy in memory, where the system can
    tell them apart).
    """
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"bytes": path.stat().st_size, "xxh3": checksum(path)}


def checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: Path, rank: int, entries: dict[str, Entry]) -> None:
    """Say that all files of this rank are on the disk."""
    write_whole(folder / f"{SEAL}{rank}", json.dumps(entries))


def checkpoint_to_resume(run_dir: RunDir) -> str | None:
    """The checkpoint that the parent has chosen for this run."""
    chosen: str | None = _chosen(run_dir).get("checkpoint")
    return chosen


def step_to_resume(run_dir: RunDir) -> int:
    """The step that it was made at; 0: the run begins."""
    step: int = _chosen(run_dir).get("step", 0)
    return step


def _chosen(run_dir: RunDir) -> dict[str, Any]:
    """Empty: the run begins."""
    if not run_dir.resume.exists():
        return {}
    content: dict[str, Any] = json.loads(run_dir.resume.read_text(encoding="utf-8"))
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `seal` wrote; raises OSError or ValueError."""
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return content


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, in words; empty when it is whole."""
    try:
        manifest = read_manifest(folder)
        files, lost = manifest["files"], missing_part(manifest["files"], manifest["num_processes"])
    except FileNotFoundError:
        return f"it has no {MANIFEST}: the save was not finished"
    except (OSError, ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    return f"{lost} is not in it" if lost else damaged_file(folder, files)


def damaged_file(folder: Path, files: dict[str, Entry]) -> str:
    """Which of a folder's files is not as it was written, in words; empty when all are."""
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
        if checksum(file) != entry["xxh3"]:
            return f"{name} has changed since it was written"
    return ""


def newest_whole(checkpoints: Path) -> Found | list[str]:
    """The newest checkpoint that is whole; else why each of those that are there is not."""
    for replaced in checkpoints.glob(f"{REPLACED}*"):  # a kill came between it and the one in its place
        target = checkpoints / replaced.name.removeprefix(REPLACED)
        if not target.exists():
            replaced.rename(target)
    skipped: list[str] = []
    for folder in reversed(numbered(checkpoints)):
        wrong = damage(folder)
        if not wrong:
            return Found(folder, step_of(folder), tuple(skipped))
        skipped.append(f"{folder.name}: {wrong}")
    return skipped


def numbered(checkpoints: Path) -> list[Path]:
    """The checkpoint folders that are visible, oldest first by their step."""
    found = [path for path in checkpoints.glob("checkpoint-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def publish(written: Path, checkpoints: Path, keep: int, about: dict[str, Any]) -> int:
    """Make a save visible in one move once every rank has sealed its part, and only then drop older ones:
    `keep` stay, and the best one. Rank 0 alone; returns the bytes of the checkpoint.
    """
    files: dict[str, Entry] = {}
    for rank in range(about["num_processes"]):
        mark = written / f"{SEAL}{rank}"
        while not mark.exists():
            for failed in written.glob(f"{FAILED}*"):
                raise OSError(failed.read_text(encoding="utf-8"))
            time.sleep(0.01)
        files |= json.loads(mark.read_text(encoding="utf-8"))
        mark.unlink()
    lost = missing_part(files, about["num_processes"])
    if lost:
        raise OSError(f"the libraries have not written {lost}")
    target = checkpoints / written.name
    with (written / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"step": step_of(target), **about, "files": files}, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    for inside in {(written / name).parent for name in files}:
        _bring_to_disk(inside)
    if target.exists():
        target.rename(target.with_name(f"{REPLACED}{target.name}"))  # the same step, saved again
    written.rename(target)
    _bring_to_disk(checkpoints)
    shutil.rmtree(written.parent, ignore_errors=True)
    best = (about.get("best") or {}).get("step")
    others = [path for path in numbered(checkpoints) if path != target and step_of(path) != best]
    over = others[: max(0, len(others) - keep + 1)]
    for old in over:
        set_aside(old)  # a kill while it is removed leaves nothing that looks like one
    for old in [*checkpoints.glob(f"{ASIDE}*"), *checkpoints.glob(f"{REPLACED}*")]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            log.warning("an old checkpoint cannot be removed: %s: %s", old, error.strerror)
    return sum(int(entry["bytes"]) for entry in files.values())


def set_aside(folder: Path) -> None:
    """Take a checkpoint out of sight; the next one that is published removes it."""
    folder.rename(folder.with_name(f"{ASIDE}{folder.name}-{time.time_ns()}"))


def cannot_write(checkpoints: Path, error: Exception) -> RunFailed:
    """The failure of a save, with what is left."""
    left = numbered(checkpoints)
    last = f"The last whole one is {left[-1]}." if left else "There is no earlier one."
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RunFailed(f"a checkpoint could not be written to {checkpoints}: {why}\n  {last}")


def _bring_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
