"""What a run would be refused for fails here with its words; words that are wrong are no check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from finetune.doctor.check import FAIL, PASS, Check
from finetune.doctor.full import full_checks
from finetune.doctor.inputs import input_checks
from finetune.errors import UserError
from finetune.paths import embedded
from finetune.training.start import check_run


@pytest.mark.parametrize(
    "word",
    ["launch.num_processes=0", "hardware=1x_h200", "run_name=a/b", "trainer.lerning_rate=1", "adapter.r=0"],
)
def test_words_that_no_machine_could_do_are_refused(word: str) -> None:
    with pytest.raises(UserError) as refused:
        full_checks(
            ["recipe=tiny_lora", word, "launch.device=cuda"]
        )  # what this machine lacks is told as well
    assert refused.value.exit_code == 2
    assert word.partition("=")[0] in str(refused.value)


def test_what_this_machine_lacks_is_a_check_that_fails(tmp_path: Path) -> None:
    words = ["recipe=tiny_lora", f"output_dir={tmp_path}", f"data.train=[{{path: {tmp_path}/no.jsonl}}]"]
    _, checks = full_checks(words)
    recipe = next(check for check in checks if check.name == "recipe")
    assert (recipe.status, "there is no such file or folder" in recipe.detail) == (FAIL, True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model in a folder of its own."""
    return Path(shutil.copytree(embedded("tiny"), tmp_path / "model"))


def checked(at: Path, *words: str) -> dict[str, Check]:
    run = check_run(["recipe=tiny_lora", f"output_dir={at}", *words])
    return {check.name: check for check in input_checks(run)}


def test_a_whole_model_and_good_rows_pass_and_nothing_is_made(tmp_path: Path, model: Path) -> None:
    checks = checked(tmp_path, f"model.name_or_path={model}")
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, PASS)
    assert list(checks) == ["run name", "model", "data"]
    assert list(tmp_path.iterdir()) == [model]


def test_a_model_without_weights_or_tokenizer_is_told_in_the_words_of_training(
    tmp_path: Path, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    told = checked(tmp_path, f"model.name_or_path={model}")["model"]
    assert (told.status, "holds no weights" in told.detail) == (FAIL, True)
    (model / "tokenizer.json").unlink()
    told = checked(tmp_path, f"model.name_or_path={model}")["model"]
    assert (told.status, "no tokenizer could be read" in told.detail) == (FAIL, True)


def test_a_run_name_that_is_taken_is_told_before_training_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    told = checked(tmp_path, "run_name=taken")["run name"]
    assert (told.status, "is there already" in told.detail) == (FAIL, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no file or folder"), ("{", "not valid JSON"), ('{"what": 1}\n', "what")],
)
def test_rows_are_looked_at_as_training_does_it(content: str | None, words: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    if content is not None:
        rows.write_text(content)
    source = f"file://{rows}" if content is None else str(rows)
    told = checked(tmp_path / "runs", f"data.train=[{{path: '{source}'}}]")["data"]
    assert (told.status, words in told.detail) == (FAIL, True), told
