"""What a store holds of a run, and whether it can take a new one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.case import Lack
from finetune.config.schema import CheckpointConfig
from finetune.errors import Refusal, refuse
from finetune.paths import RunDir
from finetune.remote.address import whole_address
from finetune.remote.store import Store, StoreError, open_store, try_out
from finetune.training.checkpoint import MANIFEST, NAME, step_of
from finetune.training.resume import NEVER

CHECKPOINTS = "checkpoints/"

FINISH = b"finish\n"
"""What a run says to the process that sends it when nothing more will come."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a run in a store, with their sizes."""

    records: dict[str, int]
    """`config.yaml` and the like; the model's files too."""
    checkpoints: dict[str, dict[str, int]]
    """The name of each checkpoint's folder, oldest first -> its files."""

    def whole(self) -> list[str]:
        """Those that have a manifest, oldest first: without one the upload was not finished."""
        return [name for name, files in self.checkpoints.items() if MANIFEST in files]


def refuse_silent_store(checkpoint: CheckpointConfig, subject: str) -> None:
    """Write a tiny file to `checkpoint.remote` and remove it: told before anything expensive."""
    if checkpoint.remote is None:
        return
    try:
        try_out(checkpoint.remote)
    except StoreError as error:
        raise _out_of_reach(checkpoint, error, subject) from None


def refuse_taken_name(checkpoint: CheckpointConfig, run_name: str, subject: str) -> None:
    """A new run never writes into another one's folder, off the machine neither."""
    if checkpoint.remote is None or checkpoint.resume != NEVER:
        return
    try:
        there = open_store(checkpoint.remote).files(run_name)
    except StoreError as error:
        raise _out_of_reach(checkpoint, error, subject) from None
    if there:
        where = f"{whole_address(checkpoint.remote)}/{run_name}"
        why = f"{where} is there already, and a run never writes into another one's folder"
        fix = f"Choose another run_name, or go on with that run: checkpoint.resume=auto run_name={run_name}."
        raise refuse(f"run_name={run_name}", why, fix, subject=subject)


def _out_of_reach(checkpoint: CheckpointConfig, error: StoreError, subject: str) -> Refusal:
    return Refusal([Lack(f"checkpoint.remote={checkpoint.remote}", str(error), error.fix)], subject)


def upload_seconds(run_dir: RunDir) -> float:
    """How long it takes to bring a checkpoint off the machine; 0 before the first one, or without a store."""
    try:
        return float(run_dir.upload_seconds.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0.0


def contents(store: Store, run_name: str) -> Contents:
    """Ask the store."""
    records: dict[str, int] = {}
    found: dict[str, dict[str, int]] = {}
    for name, size in store.files(run_name).items():
        folder, _, inside = name.removeprefix(CHECKPOINTS).partition("/")
        if name.startswith(CHECKPOINTS) and NAME.fullmatch(folder) and inside:
            found.setdefault(folder, {})[inside] = size
        elif not name.startswith(CHECKPOINTS):
            records[name] = size
    ordered = sorted(found, key=lambda name: step_of(Path(name)))
    return Contents(records, {name: found[name] for name in ordered})


def best_of(manifest: dict[str, Any]) -> str:
    """The name of the best checkpoint at the time of another one; empty where none is kept."""
    best = manifest.get("best")
    return f"checkpoint-{int(best['step'])}" if best else ""


def lacking(files: dict[str, int], manifest: dict[str, Any]) -> str:
    """What the store's listing lacks of a manifest, in words; empty when all names and sizes are there."""
    for name, entry in manifest["files"].items():
        if name not in files:
            return f"{name} is missing"
        if files[name] != entry["bytes"]:
            return f"{name} has {files[name]} bytes instead of {entry['bytes']}"
    return ""
