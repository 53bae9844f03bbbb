"""The keys of `trainer` are those of the installed SFTConfig, read without importing it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.config.keys import members
from finetune.config.trainer_fields import (
    ALIASES,
    OWNED_ELSEWHERE,
    sft_fields,
    sft_values,
    trainer_class,
    trainer_fields,
)
from finetune.paths import PACKAGE

FROZEN = Path(__file__).with_name("trainer_keys.txt")


def test_the_keys_of_trainer_are_those_frozen_in_the_list() -> None:
    assert sorted(members(trainer_class())) == FROZEN.read_text().split()


def test_every_key_that_is_refused_exists_upstream() -> None:
    assert set(OWNED_ELSEWHERE) | set(ALIASES) <= set(sft_fields())


def test_no_key_is_stored_under_an_old_name() -> None:
    stored = set(members(trainer_class()))
    assert not stored & set(ALIASES)
    assert set(ALIASES.values()) <= stored


def test_a_later_class_overrides_the_default_of_an_earlier_one() -> None:
    assert sft_fields()["learning_rate"].default == 2e-5  # SFTConfig over TrainingArguments
    assert sft_fields()["logging_steps"].default == 10  # _BaseConfig over TrainingArguments


def test_choices_come_from_upstream_enums_and_metadata() -> None:
    fields = trainer_fields()
    assert "adamw_torch_fused" in fields["optim"].choices
    assert {"linear", "cosine"} <= set(fields["lr_scheduler_type"].choices)
    assert "nll" in fields["loss_type"].choices


@pytest.mark.parametrize("key", ["bf16", "fp16", "gradient_accumulation_steps"])
def test_a_key_that_is_worked_out_when_unset_can_be_told_from_a_set_one(key: str) -> None:
    trainer = trainer_class()()
    assert getattr(trainer, key) is None
    assert key not in sft_values(trainer)


def test_values_for_sft_config_leave_out_what_is_ours_and_keep_a_null_that_means_something() -> None:
    trainer = dataclasses.replace(trainer_class()(), global_batch_size=8, pad_to_multiple_of=None)
    values = sft_values(trainer)
    assert "global_batch_size" not in values
    assert values["pad_to_multiple_of"] is None  # upstream's default is "auto"


def test_reading_the_fields_imports_no_heavy_library() -> None:
    code = (
        "import sys; from finetune.config.trainer_fields import trainer_class; trainer_class();"
        "print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_fields_and_defaults_read_are_those_of_the_imported_class() -> None:
    from trl import SFTConfig

    chosen_here = {"bf16", "fp16", "gradient_accumulation_steps", "optim"}
    imported = {f.name: f for f in dataclasses.fields(SFTConfig) if f.init}
    assert set(imported) == set(sft_fields())
    for name, field in imported.items():
        if name not in chosen_here and field.default is not dataclasses.MISSING:
            assert sft_fields()[name].default == getattr(field.default, "value", field.default), name
