"""Where rows come from: files, folders and hub data sets, each row with its file and line."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.schema import SourceConfig
from finetune.errors import Problem, Refusal, refuse

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".text")
CHUNK_ROWS = 1000
HASHED_WHOLE_BYTES = 512 * 2**20
SUBJECT = "the data"

SPLIT_WORD = re.compile(
    r"(?:^|[-_./ ])(train|training|test|testing|validation|valid|val|dev|eval)(?=[-_./ ]|$)"
)
SPLIT_OF = {
    "training": "train",
    "testing": "test",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
SPLIT_OF |= {"eval": "validation"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one file: JSON lines still as bytes, everything else as columns and values."""

    file: str
    unit: str
    """What a number counts: `line` or `row`."""
    numbers: list[int]
    """1-based place of each row in its file."""
    items: list[Any]
    problems: tuple[Problem, ...] = ()
    """Rows that could not even be read."""

    def rows(self) -> tuple[list[int], list[dict[str, Any]], list[Problem]]:
        """Parse: the numbers and values of good rows, and what is wrong with the others."""
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        problems = list(self.problems)
        for number, item in zip(self.numbers, self.items, strict=True):
            try:
                row = json.loads(item.decode("utf-8").rstrip()) if isinstance(item, bytes) else item
            except UnicodeDecodeError as error:
                problems.append(
                    self.problem(number, f"not UTF-8: byte 0x{item[error.start]:02x} at {error.start + 1}")
                )
                continue
            except (json.JSONDecodeError, RecursionError) as error:
                problems.append(self.problem(number, _json_error(error), f"It reads: {_excerpt(item)}"))
                continue
            if not isinstance(row, dict):
                why = f"a row must be a JSON object of columns, this is a {_json_type(row)}"
                problems.append(self.problem(number, why))
                continue
            numbers.append(number)
            rows.append(row)
        return numbers, rows, problems

    def problem(self, number: int, why: str, fix: str = "") -> Problem:
        """Say what is wrong with the row of this number."""
        return Problem(f"{self.file} {self.unit} {number}", why, fix)


def source_files(source: SourceConfig) -> list[Path] | None:
    """The files a source consists of, in a fixed order; None for a hub id."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _files_of_folder(path, source)
    if path.is_file():
        if source.split not in (None, "train"):
            why = f"split={source.split} has no meaning for a single file"
            raise refuse(
                f"data source {source.path}", why, "Give the file of that split as `path`.", subject=SUBJECT
            )
        return [path]
    looks_like_path = source.path.startswith((".", "/", "~")) or path.suffix.lower() in SUFFIXES
    if looks_like_path or not hub.ID.fullmatch(source.path):
        why = f"there is no file or folder {path.absolute()}"
        raise refuse(
            f"data source {source.path}", why, "A hub data set is written owner/name.", subject=SUBJECT
        )
    return None


def identity(source: SourceConfig) -> Any:
    """What must be equal for a cached result of this source to be valid: the content of its files."""
    files = source_files(source)
    if files is None:
        rows = _hub_rows(source)
        stats = [Path(entry["filename"]).stat() for entry in rows.cache_files]
        return [rows.num_rows, rows.column_names, [(entry.st_size, entry.st_mtime_ns) for entry in stats]]
    return [[str(file.absolute()), *_content(file)] for file in files]


def read(source: SourceConfig) -> Iterator[Chunk]:
    """Read a source in chunks of at most a thousand rows of one file, at most `source.limit` rows in all."""
    left = source.limit
    for chunk in _read_all(source):
        if left is None:
            yield chunk
            continue
        if left <= 0:
            return
        yield Chunk(chunk.file, chunk.unit, chunk.numbers[:left], chunk.items[:left], chunk.problems)
        left -= len(chunk.items)


def _read_all(source: SourceConfig) -> Iterator[Chunk]:
    files = source_files(source)
    if files is None:
        yield from _read_hub(source)
        return
    for file in files:
        count = 0
        for chunk in _read_file(file, source):
            count += len(chunk.items) + len(chunk.problems)
            yield chunk
        if count == 0:
            raise refuse(str(file), f"it holds no rows ({file.stat().st_size} bytes)", subject=SUBJECT)


def _read_file(file: Path, source: SourceConfig) -> Iterator[Chunk]:
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        fix = f"Known: {' '.join(SUFFIXES)}, a folder of these, or a hub id."
        raise refuse(str(file), f"files ending in {suffix or 'nothing'} cannot be read", fix, subject=SUBJECT)
    if suffix == ".parquet":
        return _read_parquet(file)
    _refuse_utf16(file)
    if suffix in (".csv", ".tsv"):
        return _read_csv(file, "\t" if suffix == ".tsv" else ",")
    if suffix in (".txt", ".text"):
        return _read_text(file)
    if suffix == ".json":
        return _read_json(file, source)
    return _read_lines(file)


def _read_lines(file: Path) -> Iterator[Chunk]:
    for numbers, lines in _numbered_lines(file):
        yield Chunk(str(file), "line", numbers, lines)


def _read_text(file: Path) -> Iterator[Chunk]:
    for numbers, lines in _numbered_lines(file):
        good_numbers, rows, problems = [], [], []
        empty = Chunk(str(file), "line", [], [])
        for number, line in zip(numbers, lines, strict=True):
            try:
                rows.append({"text": line.decode("utf-8").rstrip("\r\n")})
                good_numbers.append(number)
            except UnicodeDecodeError as error:
                problems.append(empty.problem(number, f"not UTF-8: byte 0x{line[error.start]:02x}"))
        yield Chunk(str(file), "line", good_numbers, rows, tuple(problems))


def _numbered_lines(file: Path) -> Iterator[tuple[list[int], list[bytes]]]:
    """Lines that are not blank, with their 1-based numbers, a chunk at a time."""
    with file.open("rb") as stream:
        if stream.read(3) != b"\xef\xbb\xbf":
            stream.seek(0)
        number = 0
        while block := list(islice(stream, CHUNK_ROWS)):
            numbers = [number + i for i, line in enumerate(block, 1) if not line.isspace()]
            number += len(block)
            if numbers:
                yield numbers, [line for line in block if not line.isspace()]


def _read_json(file: Path, source: SourceConfig) -> Iterator[Chunk]:
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start + 1}"
        raise refuse(str(file), why, subject=SUBJECT) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or file.stat().st_size == 0:
            yield from _read_lines(file)  # one object a line, as many data sets name it
            return
        raise refuse(f"{file} line {error.lineno}", f"not valid JSON: {error}", subject=SUBJECT) from error
    rows = _rows_of_document(file, value, source)
    for start in range(0, len(rows), CHUNK_ROWS):
        part = rows[start : start + CHUNK_ROWS]
        yield Chunk(str(file), "row", list(range(start + 1, start + len(part) + 1)), part)


def _rows_of_document(file: Path, value: Any, source: SourceConfig) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise refuse(str(file), f"it holds a single {_json_type(value)}, not a list of rows", subject=SUBJECT)
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
    raise refuse(
        str(file), f"{asked}; {found}", f"{fix} A file of one row must end in .jsonl.", subject=SUBJECT
    )


def _read_csv(file: Path, delimiter: str) -> Iterator[Chunk]:
    """Cells stay text as typed; only an empty cell is missing."""
    csv.field_size_limit(2**31 - 1)
    empty = Chunk(str(file), "line", [], [])
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        numbers: list[int] = []
        rows: list[dict[str, Any]] = []
        problems: list[Problem] = []
        try:
            header = next(reader, [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise refuse(f"{file} line 1", f"columns named twice: {', '.join(repeated)}", subject=SUBJECT)
            before = reader.line_num
            for cells in reader:
                number, before = before + 1, reader.line_num
                if not cells:
                    continue
                if len(cells) != len(header):
                    problems.append(
                        empty.problem(number, f"{len(cells)} cells, but the header names {len(header)}")
                    )
                    continue
                numbers.append(number)
                rows.append(
                    {name: cell if cell != "" else None for name, cell in zip(header, cells, strict=True)}
                )
                if len(rows) == CHUNK_ROWS:
                    yield Chunk(str(file), "line", numbers, rows, tuple(problems))
                    numbers, rows, problems = [], [], []
        except UnicodeDecodeError as error:
            line = _line_of_bad_byte(file)
            why = f"not UTF-8: byte 0x{error.object[error.start]:02x}"
            raise refuse(f"{file} line {line}", why, "Save it as UTF-8.", subject=SUBJECT) from error
        except csv.Error as error:
            raise refuse(
                f"{file} line {reader.line_num}", f"not valid CSV: {error}", subject=SUBJECT
            ) from error
        if rows or problems:
            yield Chunk(str(file), "line", numbers, rows, tuple(problems))


def _line_of_bad_byte(file: Path) -> int:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def _read_parquet(file: Path) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        start = 1
        for batch in table.iter_batches(batch_size=CHUNK_ROWS):
            yield Chunk(str(file), "row", list(range(start, start + batch.num_rows)), batch.to_pylist())
            start += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise refuse(str(file), f"not a readable parquet file: {error}", subject=SUBJECT) from error


def _read_hub(source: SourceConfig) -> Iterator[Chunk]:
    rows = _hub_rows(source)
    if rows.num_rows == 0:
        raise refuse(f"data set {source.path}", "it holds no rows", subject=SUBJECT)
    for start in range(0, rows.num_rows, CHUNK_ROWS):
        columns = rows[start : start + CHUNK_ROWS]
        values = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        yield Chunk(source.path, "row", list(range(start + 1, start + len(values) + 1)), values)


def _hub_rows(source: SourceConfig) -> Any:
    import datasets

    where = f"data source {source.path}"
    if not hub.reachable():
        datasets.config.HF_HUB_OFFLINE = True  # only its cache is left, and it must not knock for minutes
    try:
        return datasets.load_dataset(source.path, source.name, split=source.split or "train")
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


def _files_of_folder(folder: Path, source: SourceConfig) -> list[Path]:
    inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [
        file
        for file in inside
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    if not files:
        why = f"no data files in {folder.absolute()} ({len(inside)} other files)"
        raise refuse(
            f"data source {source.path}", why, f"Known endings: {' '.join(SUFFIXES)}.", subject=SUBJECT
        )
    splits = {file: _split_of(file.relative_to(folder).with_suffix("")) for file in files}
    if not any(splits.values()):
        if source.split not in (None, "train"):
            why = f"no file of {folder.absolute()} has split={source.split} in its name"
            raise refuse(f"data source {source.path}", why, subject=SUBJECT)
        return files
    wanted = SPLIT_OF.get(source.split or "train", source.split or "train")
    chosen = [file for file in files if splits[file] == wanted]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:10])
        why = f"no file of split {wanted} among {names}"
        raise refuse(f"data source {source.path}", why, "Set `split`, or give one file.", subject=SUBJECT)
    return chosen


def _split_of(name: Path) -> str | None:
    words = SPLIT_WORD.findall(name.as_posix().lower())
    return SPLIT_OF.get(words[-1], words[-1]) if words else None


def _refuse_utf16(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            fix = f"Convert it: iconv -f UTF-16 -t UTF-8 {file} > new{file.suffix}"
            raise refuse(f"{file} line 1", "it is UTF-16, only UTF-8 is read", fix, subject=SUBJECT)


def _content(file: Path) -> list[Any]:
    status = file.stat()
    if status.st_size > HASHED_WHOLE_BYTES:
        return [status.st_size, status.st_mtime_ns]
    try:
        stream = file.open("rb")
    except OSError as error:
        raise refuse(str(file), f"it cannot be read: {error.strerror}", subject=SUBJECT) from error
    with stream:
        return [status.st_size, hashlib.file_digest(stream, hashlib.sha256).hexdigest()]


def _json_error(error: json.JSONDecodeError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos + 1}"
    return "nested too deeply"


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-25:]}"


def _json_type(value: Any) -> str:
    names = {list: "list", dict: "object", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def refuse_rows(problems: list[Problem], total: int) -> Refusal:
    """Build the refusal for bad rows: the first twenty in words, all of them counted, each advice once."""
    shown = [
        Problem(p.where, p.why, p.fix if p.fix not in {q.fix for q in problems[:i]} else "")
        for i, p in enumerate(problems)
    ]
    more = total - len(problems)
    if more > 0:
        shown.append(Problem(f"and {more} more bad rows", ""))
    return Refusal(shown, f"{SUBJECT} ({total} bad rows)" if total > 1 else SUBJECT)
