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
from finetune.paths import RunDir

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PART, ASIDE = ".part", ".aside-"
"""Beside the checkpoints: where one is being written, and how those that are no longer seen begin."""
NAME = re.compile(r"checkpoint-(\d+)")
UNWANTED = ("training_args.bin",)
"""Upstream writes every argument there, a hub token in clear among them; nothing here reads it."""

BLOCK = 2**24


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is whole, and those that were passed over on the way to it."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()


def missing_part(files: Iterable[str], num_processes: int) -> str:
    """Which part of a resumable state is not among the files: upstream goes on without most in silence."""
    names = list(files)
    random_numbers = [f"rng_state_{rank}.pth" for rank in range(num_processes)]
    parts = {
        "the state of the trainer": ("trainer_state.json",),
        "the weights": (".safetensors", "pytorch_model_fsdp_0/", "global_step"),
        "the optimizer": ("optimizer.pt", "optimizer_0/", "global_step"),
        "the schedule": ("scheduler.pt", "global_step"),
        **{name: (name if num_processes > 1 else "rng_state.pth",) for name in random_numbers},
    }
    lost = [
        part for part, signs in parts.items() if not any(sign in name for sign in signs for name in names)
    ]
    return ", ".join(lost)


def seal(folder: Path, step: int, about: dict[str, Any]) -> int:
    """List every file with its size and checksum, and bring all of it to the disk; returns the bytes.

    Checksums are XXH3 (128 bits): they find damage, not forgery.
    """
    for name in UNWANTED:
        (folder / name).unlink(missing_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, "xxh3": checksum(file)}
    for inside in sorted({(folder / name).parent for name in files}, reverse=True):
        _bring_to_disk(inside)
    lost = missing_part(files, about["num_processes"])
    if lost:
        raise OSError(f"the libraries have not written {lost}")
    manifest = folder / MANIFEST
    with manifest.open("w", encoding="utf-8") as stream:
        json.dump({"step": step, **about, "files": files}, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    return sum(int(entry["bytes"]) for entry in files.values())


def checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def checkpoint_to_resume(run_dir: RunDir) -> tuple[str | None, int]:
    """The checkpoint that the parent has chosen for this run, and its step."""
    if not run_dir.resume.exists():
        return None, 0
    chosen = json.loads(run_dir.resume.read_text(encoding="utf-8"))
    return chosen["checkpoint"], chosen["step"]


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
    if lost:
        return f"{lost} is not in it"
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


def publish(beside: Path, checkpoints: Path, step: int, keep: int, about: dict[str, Any]) -> None:
    """Make a finished save visible in one move, and only then drop what is over `keep`. Rank 0 alone."""
    started = time.perf_counter()
    written, target = beside / f"checkpoint-{step}", checkpoints / f"checkpoint-{step}"
    try:
        size = seal(written, step, about)
        if target.exists():
            set_aside(target)  # the same step, saved again after a resume
        written.rename(target)
        _bring_to_disk(checkpoints)
    except OSError as error:
        raise cannot_write(checkpoints, error) from error
    shutil.rmtree(beside, ignore_errors=True)
    others = [path for path in numbered(checkpoints) if path != target]
    over = others[: max(0, len(others) - keep + 1)]
    for old in [*over, *checkpoints.glob(f"{ASIDE}*")]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            log.warning("an old checkpoint cannot be removed: %s: %s", old, error.strerror)
    seconds = time.perf_counter() - started
    log.info("saved     %s (%.1f MB, sealed in %.1f s)", target, size / 1e6, seconds)


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
