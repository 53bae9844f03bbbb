"""A resumed run is the same run in its tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.config.schema import Tracker
from finetune.paths import RunDir
from finetune.training.tracking import RememberTracker, tracker_environment


class Rank0:
    process_index = 0


def test_an_id_of_a_tracker_is_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    run_dir = RunDir(tmp_path)
    first = tracker_environment(Tracker.wandb, run_dir)
    assert first["WANDB_RESUME"] == "allow"
    monkeypatch.setenv("WANDB_RUN_ID", first["WANDB_RUN_ID"])
    RememberTracker(Tracker.wandb, run_dir).on_train_begin(Rank0(), None, None)
    assert "WANDB_RUN_ID" not in tracker_environment(Tracker.wandb, run_dir)  # the user's own stays
    monkeypatch.delenv("WANDB_RUN_ID")
    assert tracker_environment(Tracker.wandb, run_dir)["WANDB_RUN_ID"] == first["WANDB_RUN_ID"]
    assert tracker_environment(Tracker.mlflow, run_dir) == {}  # an id of another tracker is none of its own


def test_without_a_tracker_nothing_is_set(tmp_path: Path) -> None:
    assert tracker_environment(Tracker.none, RunDir(tmp_path)) == {}
    folder = tracker_environment(Tracker.tensorboard, RunDir(tmp_path))
    assert folder == {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard")}
