"""Reads files row by row, each row with its place in the file, values as they are written there."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from finetune import hub
from finetune.config.schema import SourceConfig
from finetune.data.chunk import Chunk, json_type
from finetune.data.json_list import NotJson, items
from finetune.data.source import HASHED_WHOLE_BYTES, KNOWN, SUBJECT, DataFile, source_files
from finetune.errors import Problem, Refusal, refuse

CHUNK_ROWS = 1000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(source: SourceConfig, *, streaming: bool = False) -> Iterator[Chunk]:
    """Read a source in chunks of at most a thousand rows of one file, at most `source.limit` rows in all.

    `streaming`: of a hub data set nothing is downloaded ahead of its being read.
    """
    left = source.limit
    for chunk in _read_all(source, streaming):
        if left is None:
            yield chunk
            continue
        if left <= 0:
            return
        yield chunk.first(left)
        left -= len(chunk.items)


def identity(source: SourceConfig, *, streaming: bool = False) -> Any:
    """What must be equal for a cached result of this source to be valid: the content of its files.

    A stream is too large to be read for that: sizes and times stand for it, or the commit of a hub data set.
    """
    files = source_files(source)
    if files is not None:
        whole = not streaming and sum(file.size() for file in files) <= HASHED_WHOLE_BYTES
        return [file.fingerprint(whole=whole) for file in files]
    if streaming:
        _hub_rows(source, streaming=True)  # says why when it cannot be opened
        return hub.commit_of_data_set(source.path, source.revision)
    rows = _hub_rows(source)
    stats = [Path(entry["filename"]).stat() for entry in rows.cache_files]
    return [rows.num_rows, rows.column_names, [(entry.st_size, entry.st_mtime_ns) for entry in stats]]


def _read_all(source: SourceConfig, streaming: bool) -> Iterator[Chunk]:
    files = source_files(source)
    if files is None:
        yield from _read_hub(source, streaming)
        return
    for file in files:
        count = 0
        for chunk in _read_file(file, source):
            count += len(chunk.items) + len(chunk.problems)
            yield chunk
        if count == 0:
            raise refuse(file.name, f"it holds no rows ({file.size()} bytes)", subject=SUBJECT)


def _read_file(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    reader = READERS.get(file.suffix)
    if reader is None:
        fix = f"Known: {KNOWN}; a folder of these, or a hub id."
        raise refuse(
            file.name, f"files ending in {file.suffix or 'nothing'} cannot be read", fix, subject=SUBJECT
        )
    if source.name is not None and file.suffix != ".json":
        why = f"name={source.name} has no meaning for a {file.suffix} file"
        raise refuse(
            file.name, why, "It names the field of a .json file that holds the rows.", subject=SUBJECT
        )
    if reader not in (_read_parquet, _read_arrow):
        _refuse_utf16(file)
    return reader(file, source)


def _read_lines(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    for numbers, lines in _numbered_lines(file):
        if numbers[0] == 1 and file.suffix != ".json" and lines[0].lstrip().startswith(b"["):
            why = "it begins with a list, not with an object (a row)"
            fix = "If the whole file is one JSON list, let its name end in .json."
            raise refuse(f"{file.name} line 1", why, fix, subject=SUBJECT)
        yield Chunk(file.name, "line", numbers, lines)


def _read_text(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    empty = Chunk(file.name, "line", [], [])
    for numbers, lines in _numbered_lines(file):
        good_numbers, rows, problems = [], [], []
        for number, line in zip(numbers, lines, strict=True):
            try:
                rows.append({"text": line.decode("utf-8").rstrip("\r\n")})
                good_numbers.append(number)
            except UnicodeDecodeError as error:
                why = f"not UTF-8: byte 0x{line[error.start]:02x}"
                problems.append((number, empty.problem(number, why)))
        yield Chunk(file.name, "line", good_numbers, rows, tuple(problems))


def _numbered_lines(file: DataFile) -> Iterator[tuple[list[int], list[bytes]]]:
    """Lines that are not blank, with their 1-based numbers, a chunk at a time."""
    with file.open() as stream:
        number = 0
        while block := list(islice(stream, CHUNK_ROWS)):
            if number == 0:
                block[0] = block[0].removeprefix(BYTE_ORDER_MARK)
            numbers = [number + i for i, line in enumerate(block, 1) if line and not line.isspace()]
            lines = [line for line in block if line and not line.isspace()]
            number += len(block)
            if numbers:
                yield numbers, lines


def _read_json(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    """A list of rows, a list under a field, or one object a line, as many data sets name it."""
    with file.open() as stream:
        is_list = stream.read(1024).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
    try:
        rows = _rows_of_list(file) if is_list else _rows_of_document(file, source)
        start = 1
        while part := list(islice(rows, CHUNK_ROWS)):
            yield Chunk(file.name, "row", list(range(start, start + len(part))), part)
            start += len(part)
    except _OneALine:
        yield from _read_lines(file, source)
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    except NotJson as error:
        raise refuse(f"{file.name} line {error.line}", f"not valid JSON: {error}", subject=SUBJECT) from error


class _OneALine(Exception):
    """A JSON file that holds an object on each line."""


def _rows_of_list(file: DataFile) -> Iterator[Any]:
    with file.open() as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as stream:
        yield from items(stream)


def _rows_of_document(file: DataFile, source: SourceConfig) -> Iterator[Any]:
    with file.open() as stream:
        content = stream.read().decode("utf-8-sig")
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not content:
            raise _OneALine from error
        raise NotJson(error.lineno, error.msg) from error
    except RecursionError as error:
        raise NotJson(1, "nested too deeply") from error
    yield from _rows_under_field(file.name, value, source)


def _rows_under_field(file: str, value: Any, source: SourceConfig) -> list[Any]:
    if not isinstance(value, dict):
        raise refuse(file, f"it holds a single {json_type(value)}, not a list of rows", subject=SUBJECT)
    lists = [name for name, entry in value.items() if isinstance(entry, list)]
    if source.name in lists:
        rows: list[Any] = value[source.name]
        return rows
    asked = (
        f"it has no list under name={source.name}" if source.name else "it is one object, not a list of rows"
    )
    found = f"fields that hold a list: {', '.join(lists)}" if lists else f"fields: {', '.join(value)}"
    fix = (
        f"Set `name: {lists[0]}` on this source."
        if lists
        else "Write a list of rows, or one object a line (.jsonl)."
    )
    raise refuse(file, f"{asked}; {found}", f"{fix} A file of one row must end in .jsonl.", subject=SUBJECT)


def _read_csv(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    """Cells stay text as typed; only an empty cell is missing."""
    csv.field_size_limit(2**31 - 1)
    empty = Chunk(file.name, "line", [], [])
    with file.open() as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        problems: list[tuple[int, Problem]] = []
        try:
            header = next(reader, [])
            _check_header(file, header)
            before = reader.line_num
            for cells in reader:
                number, before = before + 1, reader.line_num
                if not cells:
                    continue
                if len(cells) != len(header):
                    why = f"{len(cells)} cells, but the header names {len(header)}"
                    problems.append((number, empty.problem(number, why)))
                    continue
                numbers.append(number)
                rows.append(
                    {name: cell if cell != "" else None for name, cell in zip(header, cells, strict=True)}
                )
                if len(rows) == CHUNK_ROWS:
                    yield Chunk(file.name, "line", numbers, rows, tuple(problems))
                    numbers, rows, problems = [], [], []
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error
        except csv.Error as error:
            raise refuse(
                f"{file.name} line {reader.line_num}", f"not valid CSV: {error}", subject=SUBJECT
            ) from error
        if rows or problems:
            yield Chunk(file.name, "line", numbers, rows, tuple(problems))


def _check_header(file: DataFile, header: list[str]) -> None:
    where = f"{file.name} line 1"
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise refuse(where, f"columns named twice: {', '.join(repeated)}", subject=SUBJECT)
    other = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        why = f"its one column is named {header[0]!r}: cells seem to be separated by {other!r}"
        raise refuse(where, why, "Commas separate the cells of .csv, tabs those of .tsv.", subject=SUBJECT)


def _not_utf8(file: DataFile, error: UnicodeDecodeError) -> Refusal:
    """The refusal of a whole file, with the line of its first bad byte."""
    line = 1
    with file.open() as stream:
        for number, content in enumerate(stream, 1):
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                line = number
                break
    why = f"not UTF-8: byte 0x{error.object[error.start]:02x}"
    return refuse(f"{file.name} line {line}", why, "Save it as UTF-8.", subject=SUBJECT)


def _read_parquet(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    import pyarrow.parquet

    return _read_batches(
        file, lambda stream: pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=CHUNK_ROWS)
    )


def _read_arrow(file: DataFile, source: SourceConfig) -> Iterator[Chunk]:
    """Arrow's file format, or its stream format, in which `datasets` saves."""
    import pyarrow

    def batches(stream: IO[bytes]) -> Iterator[pyarrow.RecordBatch]:
        if stream.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(stream)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            stream.seek(0)
            yield from pyarrow.ipc.open_stream(stream)

    return _read_batches(file, batches)


def _read_batches(file: DataFile, batches: Callable[[IO[bytes]], Iterator[Any]]) -> Iterator[Chunk]:
    import pyarrow

    start = 1
    try:
        with file.open() as stream:
            for whole in batches(stream if stream.seekable() else io.BytesIO(stream.read())):
                for offset in range(0, whole.num_rows, CHUNK_ROWS):
                    rows = rows_of_arrow(whole.slice(offset, CHUNK_ROWS))
                    yield Chunk(file.name, "row", list(range(start, start + len(rows))), rows)
                    start += len(rows)
    except pyarrow.ArrowException as error:
        why = f"not a readable {file.suffix[1:]} file: {error}"
        raise refuse(file.name, why, subject=SUBJECT) from error


def rows_of_arrow(batch: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow batch or table, without the keys that Arrow added to make all objects alike."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    for name in (field.name for field in batch.schema if "struct<" in str(field.type)):
        for row in rows:
            row[name] = _without_invented_keys(row[name])
    return rows


def _without_invented_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_invented_keys(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_invented_keys(entry) for entry in value]
    return value


def _read_hub(source: SourceConfig, streaming: bool) -> Iterator[Chunk]:
    rows = _hub_rows(source, streaming=streaming).with_format("arrow")
    start = 0
    for batch in rows.iter(batch_size=CHUNK_ROWS):
        values = rows_of_arrow(batch)
        yield Chunk(source.path, "row", list(range(start + 1, start + len(values) + 1)), values)
        start += len(values)
    if start == 0:
        raise refuse(f"data set {source.path}", "it holds no rows", subject=SUBJECT)


def _hub_rows(source: SourceConfig, *, streaming: bool = False) -> Any:
    import datasets

    where = f"data source {source.path}"
    if not hub.reachable():
        datasets.config.HF_HUB_OFFLINE = True  # only its cache is left, and it must not knock for minutes
    try:
        return datasets.load_dataset(
            source.path,
            source.name,
            split=source.split or "train",
            revision=source.revision,
            streaming=streaming,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        absent = (
            f"{source.path} is no file or folder in {Path.cwd()}; as a hub data set it could not be loaded"
        )
        reason = str(error).strip() or type(error).__name__
        fix = "Check path, name and split; for a gated one log in with `hf auth login` or set HF_TOKEN."
        if not hub.reachable():
            reason = f"it is not in this machine's cache, and {hub.endpoint()} cannot be reached"
            fix = "Download it where there is a network, and give the path of its files."
        raise refuse(where, f"{absent}: {reason}", fix, subject=SUBJECT) from error


def _refuse_utf16(file: DataFile) -> None:
    with file.open() as stream:
        start = stream.read(4)
    kind = "UTF-32" if start in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") else "UTF-16"
    if kind == "UTF-32" or start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        fix = f"Convert it: iconv -f {kind} -t UTF-8 {file.name} > new{file.suffix}"
        raise refuse(f"{file.name} line 1", f"it is {kind}, only UTF-8 is read", fix, subject=SUBJECT)


READERS: dict[str, Callable[[DataFile, SourceConfig], Iterator[Chunk]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
    ".text": _read_text,
}
