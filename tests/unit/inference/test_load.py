"""Which models are open at one time."""

from __future__ import annotations

import gc
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from finetune.config.schema import ModelConfig
from finetune.inference import load
from finetune.inference.job import Job
from finetune.inference.measure import measure
from finetune.inference.subject import Weights
from finetune.paths import embedded

TINY = embedded("tiny")


def open_now() -> int:
    """None of them has been asked anything, so that nothing but `Models` could hold it."""
    gc.collect()
    return sum(issubclass(type(one), PreTrainedModel) for one in gc.get_objects())


def test_the_base_is_let_go_before_the_tuned_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TINY, tmp_path / "tuned")
    job = Job(
        run=str(tmp_path / "tuned"),
        model_words=(),
        base=asdict(ModelConfig(name_or_path=str(TINY))),
        base_inside=False,
        weights=Weights("float32", "cpu"),
        rows=None,
        batch_size=1,
        questions=(),
        max_new_tokens=1,
        tasks=(),
    )
    before, opened = open_now(), []
    really = load.open_model

    def counted(*given: object) -> object:
        opened.append(open_now() - before)
        return really(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "open_model", counted)
    measure(job, tmp_path, 0, 1)
    assert [*opened, open_now() - before] == [0, 0, 0]
