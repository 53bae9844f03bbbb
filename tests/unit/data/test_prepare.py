"""Lengths, splits, packing, cache and statistics of prepared data, through the front door."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.config.schema import DataConfig, ModelConfig, ShapeConfig, SourceConfig, TooLong
from finetune.data.prepare import PreparedData, cache_root, prepare_data
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
Learnt = Callable[[Path], list[list[str]]]

SHORT = {"prompt": "Short question one? ", "completion": "Yes."}
LONG = {"prompt": "Long: " + "pebble " * 30, "completion": "No."}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(datasets.Dataset.from_file(str(folder)))


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"{number} " * (1 + number % 7)} for number in range(count)]


def test_saved_columns_are_the_hand_off_to_the_worker(prepare: Prepare) -> None:
    saved = datasets.Dataset.from_file(str(prepare([SHORT, SHORT], "none").train))
    types = {name: feature.feature.dtype for name, feature in saved.features.items()}
    assert types == {"input_ids": "int32", "labels": "int32", "seq_lengths": "int32", "row": "int64"}
    assert [row["row"] for row in saved] == [[0], [1]]
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in saved)


def test_longer_rows_are_dropped_counted_and_named(prepare: Prepare, learnt: Learnt) -> None:
    prepared = prepare([SHORT, LONG, SHORT], "none", max_length=64)
    said = prepared.statistics["train"]
    assert (said["rows_read"], said["rows_used"], said["dropped"]) == (
        3,
        2,
        {"longer than data.max_length": 1},
    )
    assert any("dropped 1 of 3 rows" in line and "line 2" in line for line in prepared.lines)
    assert [row["row"] for row in rows_of(prepared.train)] == [[0], [2]]
    assert learnt(prepared.train) == [["Yes.<|endoftext|>"]] * 2


def test_truncated_rows_are_counted_and_rows_without_an_answer_left_are_dropped(prepare: Prepare) -> None:
    answer = {"prompt": "p ", "completion": "word " * 100}
    prepared = prepare([SHORT, LONG, answer], "none", max_length=64, too_long=TooLong.truncate)
    said = prepared.statistics["train"]
    assert said["dropped"] == {"no token left to learn after cutting to data.max_length": 1}
    assert (said["truncated"], said["rows_used"]) == (1, 2)
    assert [len(row["input_ids"]) for row in rows_of(prepared.train)][1] == 64
    assert "1 row cut to data.max_length=64" in "\n".join(prepared.lines)


def test_too_long_can_be_an_error(prepare: Prepare) -> None:
    with pytest.raises(UserError, match=r"(?s)longer than data\.max_length=64.*line 2: \d+ tokens"):
        prepare([SHORT, LONG, SHORT], "none", max_length=64, too_long=TooLong.error)


def test_more_dropped_than_allowed_is_refused_with_limit_and_rows(prepare: Prepare) -> None:
    with pytest.raises(UserError) as refusal:
        prepare([SHORT, LONG, SHORT], "none", max_length=64, max_dropped=0.2)
    for part in (
        "data.max_dropped=0.2: 1 of 3 rows (33.3%)",
        "line 2",
        "data.max_length=64",
        "the longest prompt",
    ):
        assert part in str(refusal.value)


def test_nothing_left_is_refused_whatever_may_be_dropped(prepare: Prepare) -> None:
    for way in (TooLong.drop, TooLong.truncate):
        with pytest.raises(UserError, match="no row is left to learn from"):
            prepare([LONG, LONG], "none", max_length=64, max_dropped=1.0, too_long=way)


def test_without_a_limit_the_models_positions_count(prepare: Prepare) -> None:
    very_long = {"prompt": "p ", "completion": "word " * 200}
    prepared = prepare([SHORT, very_long], "none")
    assert prepared.statistics["train"]["max_length"] == 256
    assert prepared.statistics["train"]["dropped"] == {"longer than data.max_length": 1}


def test_packed_rows_keep_their_documents_apart_and_lose_none(prepare: Prepare) -> None:
    rows = numbered(40)
    alone = {row["row"][0]: row for row in rows_of(prepare(rows, "none", max_length=64).train)}
    prepared = prepare(rows, "none", max_length=64, packing=True)
    seen = []
    for packed in rows_of(prepared.train):
        assert sum(packed["seq_lengths"]) == len(packed["input_ids"]) <= 64
        start = 0
        for index, length in zip(packed["row"], packed["seq_lengths"], strict=True):
            assert packed["input_ids"][start : start + length] == alone[index]["input_ids"]
            assert packed["labels"][start : start + length] == alone[index]["labels"]
            seen.append(index)
            start += length
    assert sorted(seen) == list(range(40))
    said = prepared.statistics["train"]
    assert said["packed_rows"] == len(rows_of(prepared.train)) < 40
    assert said["packing_efficiency"] == said["tokens"] / (said["packed_rows"] * 64)


def test_eval_fraction_divides_once_by_seed_and_apart(prepare: Prepare) -> None:
    prepared = prepare(numbered(50), eval_fraction=0.2)
    assert prepared.eval is not None
    train, held_out = (
        {row["row"][0] for row in rows_of(folder)} for folder in (prepared.train, prepared.eval)
    )
    assert len(held_out) == 10
    assert train | held_out == set(range(50))
    assert not train & held_out
    assert prepared.statistics["eval"]["rows_read"] == 10


def test_copies_across_the_split_are_counted(prepare: Prepare) -> None:
    prepared = prepare([{"text": "same"}] * 10, eval_fraction=0.2)
    assert prepared.statistics["eval"]["rows_also_in_train"] == 2
    assert "eval: 2 rows are exact copies of training rows" in prepared.lines


def test_own_eval_rows_are_prepared_beside(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "c"}\n')
    sources = [SourceConfig(path=str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")]
    model = ModelConfig(name_or_path=str(model_folder()))
    prepared = prepare_data(DataConfig(train=sources[:1], eval=sources[1:]), model, 7, tmp_path / "cache")
    assert prepared.eval is not None
    assert (len(rows_of(prepared.train)), len(rows_of(prepared.eval))) == (2, 1)


def test_second_time_comes_from_the_cache_and_any_change_misses_it(prepare: Prepare, tmp_path: Path) -> None:
    rows = numbered(5)
    first, second = prepare(rows), prepare(rows)
    assert first.statistics["train"]["cache"] == "miss"
    assert second.statistics["train"]["cache"] == "hit"
    assert second.train == first.train
    assert {**second.statistics["train"], "cache": ""} == {**first.statistics["train"], "cache": ""}
    assert first.lines[:-1] == second.lines[:-1]
    changed = [prepare(rows, "plain"), prepare(rows, packing=True), prepare(rows, max_length=200)]
    changed.append(prepare([*rows[:-1], {"text": "9"}]))
    assert all(one.statistics["train"]["cache"] == "miss" for one in changed)
    assert len({one.train for one in changed}) == 4
    assert not list((tmp_path / "cache" / "data").glob(".*")), "something half written was left"


def test_another_limit_of_the_model_misses_the_cache(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(SHORT) + "\n" + json.dumps(LONG) + "\n")
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))], max_dropped=0.8)
    used = []
    for positions in (None, 64):
        shape = ShapeConfig(max_position_embeddings=positions)
        model = ModelConfig(name_or_path=str(model_folder()), shape=shape)
        used.append(prepare_data(data, model, 7, tmp_path / "cache").statistics["train"]["rows_used"])
    assert used == [2, 1]


def test_failed_preparation_leaves_nothing_behind(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        prepare([{"text": "a"}, {"text": None}])
    assert list((tmp_path / "cache" / "data").iterdir()) == []


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("FINETUNE_CACHE")
    assert cache_root() == Path.home() / ".cache" / "finetune"


def test_token_ids_outside_the_embedding_are_refused_with_both_numbers(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "assistant"}\n')
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))])
    with pytest.raises(UserError, match=r"token id \d{3} .* outside the model's embedding of 100 rows"):
        prepare_data(data, ModelConfig(name_or_path=str(model_folder(vocab_size=100))), 7, tmp_path / "cache")
    shape = ShapeConfig(vocab_size=90, max_position_embeddings=64)
    with pytest.raises(UserError, match="embedding of 90 rows"):
        prepare_data(data, ModelConfig(name_or_path=str(model_folder()), shape=shape), 7, tmp_path / "cache")


def test_several_processes_give_what_one_gives(prepare: Prepare) -> None:
    rows = numbered(2300)
    one, two = prepare(rows, num_proc=1), prepare([*rows, {"text": "more"}], num_proc=2)
    assert rows_of(two.train)[:2300] == rows_of(one.train)
    with pytest.raises(UserError, match="line 2202: column 'text' is null"):
        prepare([*rows[:2201], {"text": None}], num_proc=2)


def test_preparing_imports_no_torch(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(SHORT) + "\n")
    code = (
        "import sys; from pathlib import Path; from finetune.config.schema import *\n"
        "from finetune.data.prepare import prepare_data\n"
        f"data = DataConfig(train=[SourceConfig(path={str(tmp_path / 'rows.jsonl')!r})])\n"
        f"prepare_data(data, ModelConfig(name_or_path={str(model_folder())!r}), 7, Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
