"""Rows arrive as they are in the file, and a bad one is named by file and line."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from finetune.config.schema import SourceConfig
from finetune.data.prepare import PreparedData
from finetune.data.read import read
from finetune.data.source import source_files
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
ROWS = [{"prompt": "a ", "completion": "b"}, {"prompt": "c ", "completion": "d"}]


def rows_of(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return [row for chunk in read(SourceConfig(path=str(path), **options)) for row in chunk.rows()[1]]


def numbers_of(path: Path) -> list[int]:
    return [number for chunk in read(SourceConfig(path=str(path))) for number in chunk.rows()[0]]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "d.csv").write_text("prompt,completion\na ,b\nc ,d\n")
    (tmp_path / "e.tsv").write_text("prompt\tcompletion\na \tb\nc \td\n")
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "f.parquet")
    with pyarrow.ipc.new_file(tmp_path / "g.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "h.arrow", table.schema) as writer:
        writer.write_table(table)
    for file in sorted(tmp_path.iterdir()):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        with pyarrow.CompressedOutputStream(tmp_path / f"{file.name}.zst", "zstd") as stream:
            stream.write(file.read_bytes())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 24
    for file in files:
        assert rows_of(file) == ROWS, file


def test_a_cut_off_archive_is_refused_by_name(prepare: Prepare, tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS * 500).encode())
    (tmp_path / "rows.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz: it cannot be read: .*ended before"):
        prepare(tmp_path / "rows.jsonl.gz")


def test_lines_are_numbered_in_archives_too(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": \n'))
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz line 3: not valid JSON"):
        prepare(tmp_path / "rows.jsonl.gz")


def test_a_glob_names_every_file_and_passes_over_none(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert [row["text"] for row in rows_of(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [row["text"] for row in rows_of(tmp_path / "**" / "*.jsonl")] == [
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
    ]
    (tmp_path / "README.md").write_text("not data")
    with pytest.raises(UserError, match=r"matches 3 files, and 1 of them are no data: .*README\.md"):
        rows_of(tmp_path / "*.*")
    with pytest.raises(UserError, match="no file matches it"):
        rows_of(tmp_path / "*.csv")


def test_a_saved_data_set_is_read_without_the_json_beside_it(tmp_path: Path) -> None:
    splits = {"train": ROWS, "test": ROWS[:1]}
    data = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    data.save_to_disk(tmp_path)
    assert rows_of(tmp_path) == ROWS
    assert rows_of(tmp_path, split="test") == ROWS[:1]
    with pytest.raises(UserError, match="it has the splits train, test, not eval"):
        rows_of(tmp_path, split="eval")


def test_an_address_is_read_like_a_path(tmp_path: Path, prepare: Prepare) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    system, at = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    contents = {"train-1.jsonl": lines, "train-2.jsonl.gz": gzip.compress(lines), "test.jsonl": lines}
    for name, content in contents.items():
        system.pipe(f"/{tmp_path.name}/{name}", content)
    assert rows_of(f"{at}/train-1.jsonl") == ROWS
    assert rows_of(at) == rows_of(f"{at}/train-*") == [*ROWS, *ROWS]
    assert rows_of(at, split="test") == ROWS
    assert prepare(f"{at}/train-1.jsonl", "none").statistics["train"]["cache"] == "miss"
    assert prepare(f"{at}/train-1.jsonl", "none").statistics["train"]["cache"] == "hit"
    system.pipe(f"/{tmp_path.name}/train-1.jsonl", lines.replace(b"b", b"x"))
    assert prepare(f"{at}/train-1.jsonl", "none").statistics["train"]["cache"] == "miss"
    with pytest.raises(UserError, match=r"absent\.jsonl: there is no such file"):
        rows_of(f"{at}/absent.jsonl")


@pytest.mark.parametrize(("scheme", "why"), [("nowhere", "Protocol not known"), ("gs", "gcsfs")])
def test_an_address_that_cannot_be_read_says_what_is_missing(scheme: str, why: str) -> None:
    if find_spec("gcsfs") and scheme == "gs":
        pytest.skip("gcsfs is installed")
    with pytest.raises(UserError, match=rf"(?s){scheme}:// could not be read: .*{why}.*package of its own"):
        rows_of(f"{scheme}://bucket/rows.jsonl")


def test_each_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes("one\r\n\r\ntwo \u00e9\n".encode())
    assert rows_of(file) == [{"text": "one"}, {"text": "two \u00e9"}]
    assert numbers_of(file) == [1, 3]


def test_csv_cells_stay_as_typed_and_only_an_empty_cell_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,completion\nq,null\nq,NA\nq,None\nq,007\nq,True\nq,2020-01-02\n"two\nlines",\n')
    answers = [row["completion"] for row in rows_of(file)]
    assert answers == ["null", "NA", "None", "007", "True", "2020-01-02", None]
    assert rows_of(file)[-1]["prompt"] == "two\nlines"


def test_csv_row_with_a_cell_too_many_is_named_by_its_line(prepare: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,completion\n"two\nlines",b\na,b,c\n')
    with pytest.raises(UserError, match=r"rows\.csv line 4: 3 cells, but the header names 2"):
        prepare(file)


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert rows_of(file) == [{"text": "a"}, {"text": "b"}]
    assert numbers_of(file) == [1, 3]


def test_lines_keep_their_number_behind_blank_ones_far_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n" * 700 + '{"text": "a"}\n' * 700)
    assert numbers_of(file) == list(range(701, 1401))


def test_malformed_lines_are_named_with_their_number(prepare: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n["a", "list"]\n{"text": "b"\n')
    with pytest.raises(UserError) as refusal:
        prepare(file)
    assert f"{file} line 2: a row must be a JSON object of columns, this is a list" in str(refusal.value)
    assert f"{file} line 3: not valid JSON" in str(refusal.value)


def test_bytes_of_another_encoding_are_refused_with_their_line(prepare: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match="line 2: not UTF-8: byte 0xe9"):
        prepare(file)
    (tmp_path / "rows.csv").write_bytes(b"text\na\nb\n\xe9\n")
    with pytest.raises(UserError, match=r"rows\.csv line 4: not UTF-8"):
        prepare(tmp_path / "rows.csv")
    (tmp_path / "wide.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(UserError, match="it is UTF-16"):
        prepare(tmp_path / "wide.jsonl")


def test_all_bad_rows_are_counted_and_twenty_shown(prepare: Prepare) -> None:
    with pytest.raises(UserError) as refusal:
        prepare([{"text": "a"}] + [{"text": None}] * 30)
    assert "30 bad rows" in str(refusal.value)
    assert str(refusal.value).count("column 'text' is null") == 20
    assert "and 10 more bad rows" in str(refusal.value)


def test_rows_under_a_field_need_the_field_named(prepare: Prepare, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"version": 1, "data": ROWS}))
    with pytest.raises(UserError, match=r"fields that hold a list: data\n.*Set `name: data`"):
        prepare(file)
    assert rows_of(file, name="data") == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_empty_file_is_refused_by_name(prepare: Prepare, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"{name}: it holds no rows \(0 bytes\)"):
        prepare(tmp_path / name)


def test_missing_path_is_refused_with_the_absolute_one(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"there is no file or folder {tmp_path}/absent"):
        prepare(tmp_path / "absent")
    with pytest.raises(UserError, match=rf"there is no file or folder {Path.cwd()}/rows\.jsonl"):
        source_files(SourceConfig(path="rows.jsonl"))


def test_owner_and_name_is_a_hub_id() -> None:
    assert source_files(SourceConfig(path="owner/name")) is None


def test_hub_data_set_out_of_reach_is_one_error_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, prepare: Prepare
) -> None:
    monkeypatch.setattr("finetune.hub.reachable", lambda: False)
    with pytest.raises(UserError, match=r"not in this machine's cache, and .* cannot be reached"):
        prepare(Path("owner/name-that-is-not-here"))


def test_folder_is_read_in_order_and_keeps_to_the_training_files(tmp_path: Path) -> None:
    for name in ("train-2", "train-1", "test-1"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert rows_of(tmp_path) == [{"text": "train-1"}, {"text": "train-2"}]
    assert rows_of(tmp_path, split="test") == [{"text": "test-1"}]


def test_folder_without_split_names_is_read_whole(tmp_path: Path, prepare: Prepare) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text("not data")
    assert rows_of(tmp_path) == [{"text": "a"}, {"text": "b"}]
    assert f"{tmp_path}: not read: README.md (1 files)" in prepare(tmp_path, "none", source={}).lines


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(2500)))
    assert len(rows_of(file, limit=1500)) == 1500
    assert len(rows_of(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '[{"text": "x"}]', "begins with a list.*let its name end in .json"),
        ("a.csv", "prompt;completion\na;b\n", "cells seem to be separated by ';'"),
        ("a.txt", "x\n".encode("utf-32"), "it is UTF-32"),
        ("a.json", "[" * 3000, "nested too deeply"),
    ],
)
def test_files_that_are_another_kind_say_so(
    prepare: Prepare, tmp_path: Path, name: str, content: str | bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"(?s){why}"):
        prepare(tmp_path / name, "none")


def test_name_is_for_json_alone(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"name=rows has no meaning for a \.jsonl file"):
        prepare(tmp_path / "a.jsonl", "none", source={"name": "rows"})


def test_a_limit_does_not_judge_rows_behind_it(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\nc,d\ne,f,g\n")
    assert prepare(tmp_path / "a.csv", "none", source={"limit": 2}).statistics["train"]["rows_used"] == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match="it cannot be read: Permission denied"):
        rows_of(tmp_path / "closed")
