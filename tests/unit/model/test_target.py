"""Where a merged model goes: inside its run, else beside the folder, and only where there is room."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.errors import Problem
from finetune.model import target as module
from finetune.model.source import find_source
from finetune.model.target import find_target


def whole(folder: Path, size: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}), encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return folder


@pytest.mark.parametrize(("dtype", "fits"), [(None, True), ("float16", True), ("float32", False)])
def test_a_disk_that_is_too_small_is_foreseen(
    dtype: str | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Problem] = []
    source = find_source(str(whole(tmp_path / "model", 10**9)), [], problems)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=15 * 10**8))
    assert find_target(source, None, dtype, problems) == tmp_path / "model-merged"
    told = [] if fits else ["1.5 GB are free there"]
    assert [text for text in told if text in str(problems[0])] == told
    assert len(problems) == len(told)


def test_a_run_keeps_what_is_merged_from_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    whole(run / "model", 8)
    whole(run / "checkpoints" / "checkpoint-5", 8)
    base = whole(tmp_path / "base", 8)
    (run / "config.yaml").write_text(f"model: {{name_or_path: {base}}}\n", encoding="utf-8")
    places = {}
    for word in ("", "model", "checkpoints/checkpoint-5"):
        problems: list[Problem] = []
        source = find_source(str(run / word), [], problems)
        places[word] = find_target(source, None, None, problems)
        assert (problems, source is not None and source.run is not None) == ([], True)
    assert places == {
        "": run / "merged",
        "model": run / "merged",
        "checkpoints/checkpoint-5": run / "merged-checkpoint-5",
    }
