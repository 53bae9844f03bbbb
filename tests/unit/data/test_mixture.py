"""Several sources in parts, streams that are read no further than needed, rows of a user's own making."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.config.compose import compose
from finetune.config.devices import Devices
from finetune.config.rules import resolve_rows
from finetune.config.schema import DataConfig, ModelConfig, SourceConfig, TooLong
from finetune.data import gather
from finetune.data.chunk import Chunk
from finetune.data.prepare import PreparedData, prepare_data
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
Mix = Callable[..., PreparedData]


@pytest.fixture
def mix(model_folder: Callable[..., Path], tmp_path: Path) -> Mix:
    """Prepare sources of so many rows of text, each row telling its source."""

    def run(
        sizes: dict[str, int], weights: list[float | None], *, needed: int = 0, seed: int = 7, **options: Any
    ) -> PreparedData:
        sources = []
        for (name, size), weight in zip(sizes.items(), weights, strict=True):
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(size)))
            sources.append(SourceConfig(path=str(file), weight=weight))
        model = ModelConfig(name_or_path=str(model_folder("none")))
        return prepare_data(DataConfig(train=sources, **options), model, seed, tmp_path / "cache", needed)

    return run


def rows_by_source(prepared: PreparedData, sizes: dict[str, int]) -> dict[str, list[int]]:
    """The row numbers of each source that are in the prepared rows."""
    starts = itertools.accumulate([0, *sizes.values()])
    rows = [row for group in datasets.Dataset.from_file(str(prepared.train))["row"] for row in group]
    return {
        name: [row - start for row in rows if start <= row < start + size]
        for (name, size), start in zip(sizes.items(), starts, strict=False)
    }


def test_weights_are_parts_of_the_mixture_drawn_by_seed(mix: Mix) -> None:
    sizes = {"a": 300, "b": 100, "c": 100}
    prepared = mix(sizes, [3, 1, 0.5])
    drawn = rows_by_source(prepared, sizes)
    assert {name: len(rows) for name, rows in drawn.items()} == {"a": 300, "b": 100, "c": 50}
    assert all(len(set(rows)) == len(rows) for rows in drawn.values())
    assert drawn["c"] != list(range(50))
    said = prepared.statistics["train"]
    assert (said["rows_read"], said["rows_used"], said["not_drawn"], said["dropped"]) == (500, 450, 50, {})
    assert any("c.jsonl: 50 of 100 rows drawn, weight 0.5 of 4.5 (11.1%)" in line for line in prepared.lines)
    assert rows_by_source(mix(sizes, [3, 1, 0.5]), sizes) == drawn
    assert rows_by_source(mix(sizes, [3, 1, 0.5], seed=8), sizes)["c"] != drawn["c"]


def test_a_part_that_comes_to_no_row_is_refused(mix: Mix) -> None:
    with pytest.raises(
        UserError, match=r"b\.jsonl of weight 1: its part comes to no row, for .*a\.jsonl has 3 usable rows"
    ):
        mix({"a": 3, "b": 90}, [1000, 1])


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_stream_is_read_no_further_than_the_steps_need(mix: Mix, num_proc: int) -> None:
    sizes = {"a": 30_000}
    prepared = mix(sizes, [None], needed=4500, streaming=True, num_proc=num_proc)
    assert rows_by_source(prepared, sizes)["a"] == list(range(5000))
    assert prepared.statistics["train"]["rows_read"] == 5000


def test_a_stream_counts_only_rows_that_can_be_used_and_packs_enough(mix: Mix, tmp_path: Path) -> None:
    sizes = {"a": 20_000}
    packed = mix(sizes, [None], needed=100, streaming=True, packing=True, max_length=128)
    assert packed.statistics["train"]["packed_rows"] >= 100
    assert packed.statistics["train"]["rows_read"] < 5000
    held_out = mix(sizes, [None], needed=900, streaming=True, eval_fraction=0.5)
    assert held_out.statistics["train"]["rows_used"] >= 900


def test_streamed_sources_are_read_by_weight(mix: Mix) -> None:
    sizes = {"a": 20_000, "b": 20_000}
    prepared = mix(sizes, [3, 1], needed=4000, streaming=True)
    assert prepared.statistics["train"]["rows_read"] == 4000
    assert [line.split(": ", 2)[2] for line in prepared.lines if "drawn" in line] == [
        "3,000 of 3,000 rows drawn, weight 3 of 4 (75.0%)",
        "1,000 of 1,000 rows drawn, weight 1 of 4 (25.0%)",
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data.streaming=true", "data.train=[{path: a.jsonl}]"], "a stream has no known length"),
        (["data.train=[{path: a, weight: 1}, {path: b}]"], "1 of 2 sources have a weight"),
        (["data.train=[{path: a, weight: -1}]"], r"weight=-1: must be greater than 0"),
        (
            ["data.streaming=true", "trainer.max_steps=1", "data.train=[{path: a}, {path: b}]"],
            "nothing says in which parts the 2 sources are read",
        ),
        (
            ["data.train=[{path: a, format: sharegtp}]"],
            r"(?s)format=sharegtp: it is no format.*Did you mean sharegpt",
        ),
        (["data.train=[{path: '  '}]"], "it is empty"),
        (["data.eval=[{path: a}]", "data.eval_fraction=0.1"], "both give rows for evaluation"),
        (["data.train=[{path: a, format: 'm:f', columns: {text: body}}]"], "m:f makes the rows"),
    ],
)
def test_sources_that_contradict_themselves_are_refused_before_anything_is_read(
    words: list[str], why: str
) -> None:
    config = compose(["recipe=tiny_lora", *words]).config
    with pytest.raises(UserError, match=why):
        resolve_rows(config, devices=Devices(gpus=0, cpu_cores=2))


OWN = """
def talk(row):
    if row["skip"]:
        return None
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]}

def broken(row):
    return row["absent"]

def wrong(row):
    return [row]
"""
OWN_ROWS = [{"q": "x", "a": "yes", "skip": False}, {"q": "x", "a": "no", "skip": True}]


def test_a_function_of_the_user_makes_the_rows(
    prepare: Prepare, learnt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rows.py").write_text(OWN)
    prepared = prepare(OWN_ROWS, source={"format": "own_rows:talk"})
    assert learnt(prepared.train) == [["yes<|im_end|>"]]
    said = prepared.statistics["train"]
    assert (said["format"], said["dropped"]) == ("messages", {"left out by own_rows:talk": 1})
    assert any("messages, made by own_rows:talk" in line for line in prepared.lines)
    with pytest.raises(UserError, match=r"(?s)line 1: own_rows:broken raised KeyError: 'absent'.*line 2"):
        prepare(OWN_ROWS, source={"format": "own_rows:broken"})
    with pytest.raises(UserError, match=r"own_rows:wrong returned list, not a row"):
        prepare(OWN_ROWS, source={"format": "own_rows:wrong"})
    with pytest.raises(UserError, match="own_rows has no function absent"):
        prepare(OWN_ROWS, source={"format": "own_rows:absent"})
    with pytest.raises(UserError, match="there is no module no_such_module"):
        prepare(OWN_ROWS, source={"format": "no_such_module:f"})


def test_token_ids_are_taken_as_they_are(prepare: Prepare) -> None:
    rows = [
        {"input_ids": [9, 8, 7], "labels": [-100, 8, 7]},
        {"input_ids": [5, 6]},
        {"input_ids": [5, 6], "labels": [-100, -100]},
    ]
    prepared = prepare(rows, "none")
    saved = [(row["input_ids"], row["labels"]) for row in datasets.Dataset.from_file(str(prepared.train))]
    assert saved == [([9, 8, 7], [-100, 8, 7]), ([5, 6], [5, 6])]
    assert prepared.statistics["train"]["format"] == "tokenized"
    assert prepared.statistics["train"]["dropped"] == {"no answer to learn": 1}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, r"labels\[1\] is 3, but input_ids\[1\] is 2"),
        ({"input_ids": ["a"]}, "not a list of whole numbers"),
        ({"input_ids": [-1, 3]}, "which is no token"),
        ({"input_ids": [1, 2**40]}, "holds 1099511627776, which is no token"),
        ({"input_ids": [1, 9999]}, "line 1: input_ids holds 9999, and the model's embedding has 400 rows"),
    ],
)
def test_bad_token_ids_are_named(prepare: Prepare, row: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        prepare([row], "none")


def test_rows_held_out_for_evaluation_are_all_used_whatever_the_weights(mix: Mix) -> None:
    prepared = mix({"a": 40, "b": 40}, [9, 1], eval_fraction=0.25)
    assert (prepared.statistics["eval"]["rows_used"], prepared.statistics["eval"]["not_drawn"]) == (20, 0)
    train = prepared.statistics["train"]
    assert train["rows_used"] + train["not_drawn"] == 60
    assert train["not_drawn"] > 0


def test_a_stream_leaves_out_what_cannot_be_used_when_it_counts(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"text": "long " * 50} if n % 2 else {"text": f"{n}"} for n in range(20_000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ModelConfig(name_or_path=str(model_folder("none")))
    source = [SourceConfig(path=str(tmp_path / "rows.jsonl"))]
    options: dict[str, Any] = {"train": source, "streaming": True, "max_length": 64}
    dropped = prepare_data(DataConfig(**options), model, 7, tmp_path / "cache", 2000).statistics["train"]
    assert (dropped["rows_read"], dropped["rows_used"]) == (4000, 2000)
    cut = DataConfig(**options, too_long=TooLong.truncate, packing=True)
    packed = prepare_data(cut, model, 7, tmp_path / "cache", 1900).statistics["train"]
    assert packed["packed_rows"] >= 1900
    assert packed["rows_read"] < 6000


def test_a_stream_encodes_little_more_than_it_needs(
    mix: Mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_chunks: list[int] = []
    original = gather.read

    def counted(source: SourceConfig, *, streaming: bool) -> Iterator[Chunk]:
        for chunk in original(source, streaming=streaming):
            read_chunks.append(len(chunk.items))
            yield chunk

    monkeypatch.setattr(gather, "read", counted)
    mix({"a": 50_000}, [None], needed=10, streaming=True)
    assert sum(read_chunks) <= 15_000


def test_a_miss_says_what_changed(mix: Mix, tmp_path: Path) -> None:
    first = mix({"a": 5}, [None]).lines[-1]
    assert "written to the cache (the first time for these sources)" in first
    assert "found in the cache" in mix({"a": 5}, [None]).lines[-1]
    assert "changed since the last time: the files of data.train)" in mix({"a": 6}, [None]).lines[-1]
    assert "changed since the last time: data.max_length)" in mix({"a": 6}, [None], max_length=99).lines[-1]


def test_a_damaged_cache_is_made_again(mix: Mix) -> None:
    whole = mix({"a": 5}, [None])
    for name, spoil in (("train.arrow", b"half"), ("statistics.json", b"{")):
        (whole.train.parent / name).write_bytes(spoil)
        again = mix({"a": 5}, [None])
        assert again.statistics["train"]["cache"] == "miss"
        assert datasets.Dataset.from_file(str(again.train)).num_rows == 5
    (whole.train.parent / "statistics.json").unlink()
    assert mix({"a": 5}, [None]).statistics["train"]["cache"] == "miss"


def test_a_cache_that_cannot_be_written_is_one_error(mix: Mix, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"(?s)prepared rows cannot be written.*FINETUNE_CACHE"):
        mix({"a": 5}, [None])


def test_refusals_come_through_from_the_processes_that_tokenise(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(talk) + "\n") * 3000)
    data = DataConfig(train=[SourceConfig(path=str(tmp_path / "rows.jsonl"))], num_proc=2)
    with pytest.raises(UserError, match="would never learn to stop"):
        prepare_data(data, ModelConfig(name_or_path=str(model_folder("endless"))), 7, tmp_path / "cache")


def test_a_users_function_and_what_it_imports_count_for_the_cache(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suffixes.py").write_text("SUFFIX = 'one'\n")
    (tmp_path / "own_cached.py").write_text(
        "import suffixes\ndef talk(row):\n    return {'text': row.pop('q') + suffixes.SUFFIX}\n"
    )
    (tmp_path / "rows.csv").write_text("q\nx\ny\n")
    options: dict[str, Any] = {"template": "none", "source": {"format": "own_cached:talk"}}
    first = prepare(tmp_path / "rows.csv", **options)
    assert first.statistics["train"]["samples"][0]["text"] == "xone<|endoftext|>"
    assert prepare(tmp_path / "rows.csv", **options).statistics["train"]["cache"] == "hit"
    (tmp_path / "suffixes.py").write_text("SUFFIX = 'other'\n")
    assert prepare(tmp_path / "rows.csv", **options).statistics["train"]["cache"] == "miss"
