"""A run's folder is there whole, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.errors import Refusal
from finetune.training import start
from finetune.training.start import check_run, describe_machine, open_run, to_resume
from tests.front_door import wait_for


def test_an_end_while_the_folder_is_made_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "recipe=tiny_lora",
        "launch.device=cpu",
        "run_name=run",
        f"output_dir={tmp_path / 'runs'}",
        "checkpoint.resume=auto",
    ]
    run = check_run(words)
    with monkeypatch.context() as patched:
        patched.setattr(start, "_environment", lambda composed: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_run(run)
    assert list((tmp_path / "runs").iterdir()) == []
    assert to_resume(run) is None
    opened = open_run(run)
    assert opened.path == tmp_path / "runs" / "run"
    assert opened.config.exists()
    assert opened.checkpoints.is_dir()
    assert list((tmp_path / "runs").iterdir()) == [opened.path]
    with pytest.raises(Refusal, match="is there already"):
        open_run(run)
    assert json.loads(opened.environment.read_text())["machine"] is None  # asked beside the workers
    describe_machine(opened)
    wait_for("machine", lambda: '"provider"' in opened.environment.read_text(), seconds=30)
    assert to_resume(run) is not None
