"""The run in its tracker: one there for one here, also when it is resumed or goes on on another machine."""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

from transformers import TrainerCallback

from finetune.config.schema import Tracker
from finetune.paths import RunDir, write_whole


def tracker_environment(tracker: Tracker, run_dir: RunDir) -> dict[str, str]:
    """Variables by which the Trainer's integrations find this run again; those of the user stay.

    Trackio goes on with a run of the same name by itself. Tensorboard joins the files of one folder.
    """
    if tracker is Tracker.tensorboard:
        wanted = {"TENSORBOARD_LOGGING_DIR": str(run_dir.path / "tensorboard")}
    elif tracker is Tracker.wandb:
        known = _known(tracker, run_dir) or secrets.token_hex(4)
        wanted = {"WANDB_RUN_ID": known, "WANDB_RESUME": "allow", "WANDB_DIR": str(run_dir.path)}
    elif tracker is Tracker.mlflow and (begun := _known(tracker, run_dir)):
        wanted = {"MLFLOW_RUN_ID": begun}
    else:
        wanted = {}
    return {name: value for name, value in wanted.items() if name not in os.environ}


class RememberTracker(TrainerCallback):
    """Writes the id that the tracker knows this run by into the run's folder; rank 0 alone."""

    def __init__(self, tracker: Tracker, run_dir: RunDir) -> None:
        self.tracker = tracker
        self.run_dir = run_dir

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 0:
            write_whole(self.run_dir.tracking, json.dumps({self.tracker.value: self._id()}) + "\n")

    def _id(self) -> str | None:
        if self.tracker is Tracker.mlflow:
            return str(sys.modules["mlflow"].active_run().info.run_id)  # the integration has imported it
        return os.environ.get("WANDB_RUN_ID") if self.tracker is Tracker.wandb else self.run_dir.path.name


def _known(tracker: Tracker, run_dir: RunDir) -> str | None:
    if not run_dir.tracking.exists():
        return None
    known: str | None = json.loads(run_dir.tracking.read_text(encoding="utf-8")).get(tracker.value)
    return known
