"""What a rehearsal refuses before anything starts, what its lines look like, and where its rows come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from finetune.config.compose import compose
from finetune.config.schema import Strategy
from finetune.doctor.check import PASS
from finetune.errors import Refusal
from finetune.paths import embedded
from finetune.rehearse.every import rehearse_all
from finetune.rehearse.play import package_environment
from finetune.rehearse.rehearsal import SKIP, Stage, rehearse, stage_lines
from finetune.rehearse.room import LEAST_BYTES, NoRoom, needed_bytes, refuse_small_room
from finetune.rehearse.twin_config import standing_for, twin_config


def unexpected(stage: Stage, label: str) -> None:
    pytest.fail(f"{stage.name} has started")


def test_a_small_disk_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=30 * 10**6)
    monkeypatch.setattr("finetune.rehearse.room.shutil.disk_usage", lambda folder: usage)
    for play in (rehearse, rehearse_all):
        with pytest.raises(NoRoom, match=r"needs about 100 MB in TMPDIR \(.*\), and 30 MB are free there"):
            play(["model=tiny"], unexpected)


def test_a_disk_that_is_large_enough_for_the_twin_is_taken(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(NoRoom, match="set TMPDIR to a folder on another disk"):
        refuse_small_room(tmp_path, 2 * free)
    refuse_small_room(tmp_path, free // 2)


def test_checkpoints_of_all_weights_need_the_most_room() -> None:
    assert needed_bytes(0, all_trained=True) == LEAST_BYTES
    adapter, full = (needed_bytes(10**6, all_trained=trained) - LEAST_BYTES for trained in (False, True))
    assert adapter == 16 * 10**6  # four copies in float32
    assert full - adapter == 7 * 16 * 10**6  # checkpoints


def test_a_file_is_meant_from_where_the_person_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copy(embedded("behaviour.jsonl"), tmp_path / "here.jsonl")
    paths = ["here.jsonl", "*.jsonl", "missing.jsonl", "data/missing.jsonl", "s3://bucket/rows.jsonl"]
    sources = json.dumps([{"path": path} for path in paths])
    config = compose(["recipe=tiny_lora", f"data.train={sources}"]).config
    standing = standing_for(config)
    assert standing.notes == ()  # a missing file is no data set of the hub that cannot be reached
    played = twin_config(config, standing, Strategy.single, 1, tmp_path, tmp_path)
    full = [str(tmp_path / path) for path in paths[:-1]]
    assert [source.path for source in played.data.train] == [*full, paths[-1]]
    assert str(tmp_path) in package_environment(tmp_path / "other")["PYTHONPATH"]  # a format of one's own


def test_the_lines_of_all_cases_stand_below_each_other() -> None:
    short = stage_lines(
        Stage("a", PASS, 1.0, "Qwen3ForCausalLM under ddp"), f"{' 3 of 27  qwen3, lora, ddp':<38} ", 80
    )
    wide = stage_lines(
        Stage("b", SKIP, 0.0, "word " * 20), f"{'27 of 27  qwen3, qlora, zero2_offload':<38} ", 80
    )
    head, *below = wide.splitlines()
    assert short.index(" pass ") == head.index(" skip ")
    assert max(map(len, [*short.splitlines(), head, *below])) <= 80
    assert head.endswith(" 0.0 s")
    assert all(line.startswith(" " * 26 + "word") for line in below)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=nosuch"], r"model=nosuch: no such choice\n.*of: .*qwen8b"),
        (["model=[tiny"], r"model=\[tiny: no such choice"),
        (["model=[tiny,nosuch]"], r"  model=nosuch: no such choice"),
        (["distributed=zero9"], r"distributed=zero9: no such choice\n.*of: single, ddp,"),
        (["recipe=tiny_lora"], r"recipe=tiny_lora: with --all the words choose from model, adapter, distr"),
        (["model=nosuch", "adapter=x"], r"2 problems in rehearse --all"),
    ],
)
def test_words_that_choose_nothing_are_refused_with_the_names_that_exist(words: list[str], told: str) -> None:
    with pytest.raises(Refusal, match=told):
        rehearse_all(words, unexpected)


def test_a_stage_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = []

    def cases(models: str, methods: list[str], *rest: object) -> list[Stage]:
        return [Stage(f"{method}", SKIP, 0.0, "") for method in methods]

    monkeypatch.setattr("finetune.rehearse.every._stages", cases)
    words = ["model=[tiny,llama8b]", "adapter=[full, lora]", "distributed=ddp"]
    rehearse_all(words, lambda stage, label: labels.append(label))
    assert [label.split("  ")[0] for label in labels] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert len(set(map(len, labels))) == 1
