"""What of a run is in its store and verified: what is kept there, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.paths import RunDir
from finetune.remote.store import Store, StoreError
from finetune.report.record import Report, read_report
from finetune.training.checkpoint import MANIFEST, step_of
from finetune.training.remote_run import best_of, contents


class Sent:
    """The checkpoints of one run that are there, and whether its model is."""

    def __init__(self, run_dir: RunDir, where: str, keep: int, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.name = run_dir.path.name
        self.where = where
        self.keep = keep
        self.say = say
        self.checkpoints: list[str] = []
        self.model = False

    def prune(self, store: Store, newest: int, manifest: dict[str, Any], *, remove: bool) -> None:
        """Remove what is over `keep` and not the best, what was left half there, and steps that the run went
        back behind.
        """
        try:
            there = contents(store, self.name)
            whole = [name for name in there.whole() if step_of(Path(name)) <= newest]
            kept = {*whole[-self.keep :], best_of(manifest)}
            self.checkpoints = [name for name in whole if name in kept]
            for name in [name for name in there.checkpoints if remove and name not in self.checkpoints]:
                if MANIFEST in there.checkpoints[name]:
                    store.remove(f"{self.name}/checkpoints/{name}/{MANIFEST}")
                store.remove(f"{self.name}/checkpoints/{name}")
        except StoreError as error:
            self.say(f"WARNING   old checkpoints at {self.where} cannot be removed: {error}")

    def describe(self) -> str:
        parts = [*self.checkpoints[-1:], *(["the model"] if self.model else []), "the records"]
        return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]

    def write_report(self, error: str | None = None) -> None:
        """Say in the report what is there; without an error all of it is."""
        known = read_report(self.run_dir) if self.run_dir.report.exists() else {}
        about = {
            "address": self.where,
            "verified": error is None,
            "checkpoints": self.checkpoints,
            "model": self.model,
        }
        known["remote"] = about if error is None else {**about, "error": error}
        Report(self.run_dir, known).write()
