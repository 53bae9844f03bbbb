"""Rows arrive as they are in the file, and a bad one is named by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.config.schema import SourceConfig
from finetune.data.load import read, source_files
from finetune.data.prepare import PreparedData
from finetune.errors import UserError

Prepare = Callable[..., PreparedData]
ROWS = [{"prompt": "a ", "completion": "b"}, {"prompt": "c ", "completion": "d"}]


def rows_of(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [row for chunk in read(SourceConfig(path=str(path), **options)) for row in chunk.rows()[1]]


def numbers_of(path: Path) -> list[int]:
    return [number for chunk in read(SourceConfig(path=str(path))) for number in chunk.rows()[0]]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "d.csv").write_text("prompt,completion\na ,b\nc ,d\n")
    (tmp_path / "e.tsv").write_text("prompt\tcompletion\na \tb\nc \td\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert rows_of(file) == ROWS, file


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


def test_folder_without_split_names_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text("not data")
    assert rows_of(tmp_path) == [{"text": "a"}, {"text": "b"}]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(2500)))
    assert len(rows_of(file, limit=1500)) == 1500
    assert len(rows_of(file, limit=1)) == 1
