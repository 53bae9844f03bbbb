"""Which files a source consists of: here or behind an address, folders, globs, saved data sets, hub ids."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from finetune import hub
from finetune.config.schema import SourceConfig
from finetune.errors import Refusal, UserError, refuse

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".text")
COMPRESSIONS = (".gz", ".zst")
KNOWN = f"{' '.join(SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)} behind it"
HASHED_WHOLE_BYTES = 2 * 2**30
"""Of larger sources sizes and times stand for the content, which would take longer to read."""
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
    "eval": "validation",
}
GLOB = re.compile(r"[*?\[]")
CONTENT_MARKS = (
    "ETag",
    "etag",
    "checksum",
    "md5",
    "mtime",
    "LastModified",
    "last_modified",
    "blob_id",
    "lfs",
)
"""What file systems call the things that change with a file's content."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file, on this machine or behind an address."""

    name: str
    """As it is shown."""
    path: str
    system: AbstractFileSystem | None = None
    """None: this machine's own files."""

    @property
    def suffix(self) -> str:
        """What the content is: the last ending that is not a compression's."""
        return _suffix(self.path)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open for reading, decompressed by its ending; what goes wrong names the file."""
        try:
            with self._raw() as raw, _decompressed(self.path, raw) as stream:
                yield stream
        except UserError:
            raise
        except (OSError, EOFError, ImportError, zlib.error, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise refuse(self.name, f"it cannot be read: {why}", subject=SUBJECT) from error

    def size(self) -> int:
        """Bytes on disk."""
        return (
            Path(self.path).stat().st_size if self.system is None else int(self.system.size(self.path) or 0)
        )

    def fingerprint(self, *, whole: bool) -> list[Any]:
        """What changes whenever the content does; `whole`: read it if nothing else tells."""
        if self.system is not None:
            info = self.system.info(self.path)
            marks = {mark: str(info[mark]) for mark in CONTENT_MARKS if info.get(mark) is not None}
            if marks:
                return [self.name, info.get("size"), marks]
        elif not whole:
            status = Path(self.path).stat()
            return [self.name, status.st_size, status.st_mtime_ns]
        if not whole:
            return [self.name, self.size()]
        digest = hashlib.sha256()
        try:
            with self._raw() as stream:
                while block := stream.read(2**20):
                    digest.update(block)
        except OSError as error:
            raise refuse(
                self.name, f"it cannot be read: {error.strerror or error}", subject=SUBJECT
            ) from error
        return [self.name, digest.hexdigest()]

    def _raw(self) -> IO[bytes]:
        if self.system is None:
            return Path(self.path).open("rb")
        stream: IO[bytes] = self.system.open(self.path, "rb")
        return stream


def source_files(source: SourceConfig) -> list[DataFile] | None:
    """The files a source consists of, in a fixed order; None for a hub id."""
    try:
        return _source_files(source)
    except OSError as error:
        raise _refused(source, f"it cannot be read: {error.strerror or error}") from error


def passed_over(source: SourceConfig) -> list[str]:
    """The files of a source's folder that are not read: other kinds, other splits."""
    folder = Path(source.path.removeprefix("file://")).expanduser()
    if not folder.is_dir() or _files_of_saved_data_set(folder, source) is not None:
        return []
    read = {file.path for file in _files_of_folder(folder, source)}
    inside = (file for file in sorted(folder.rglob("*")) if file.is_file() and str(file) not in read)
    names = (file.relative_to(folder) for file in inside)
    return [str(name) for name in names if not any(part.startswith(".") for part in name.parts)]


def _source_files(source: SourceConfig) -> list[DataFile] | None:
    if "://" in source.path and not source.path.startswith("file://"):
        return _files_of_address(source)
    path = Path(source.path.removeprefix("file://")).expanduser()
    if path.is_dir():
        return _files_of_folder(path, source)
    if path.is_file():
        _refuse_split_of_a_file(source)
        return [_local(path)]
    if GLOB.search(str(path)):
        return _files_of_glob(path, source)
    looks_like_path = source.path.startswith((".", "/", "~")) or _suffix(source.path) in SUFFIXES
    if looks_like_path or not hub.ID.fullmatch(source.path):
        raise _refused(
            source, f"there is no file or folder {path.absolute()}", "A hub data set is written owner/name."
        )
    return None


def _local(path: Path) -> DataFile:
    return DataFile(str(path), str(path))


def _suffix(path: str) -> str:
    name = PurePosixPath(path)
    return (PurePosixPath(name.stem) if name.suffix.lower() in COMPRESSIONS else name).suffix.lower()


def _files_of_folder(folder: Path, source: SourceConfig) -> list[DataFile]:
    saved = _files_of_saved_data_set(folder, source)
    if saved is not None:
        return saved
    inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    names = {file.relative_to(folder).as_posix(): _local(file) for file in inside}
    return _chosen(names, f"{folder.absolute()}", source)


def _files_of_saved_data_set(folder: Path, source: SourceConfig) -> list[DataFile] | None:
    """Of a folder that `datasets`' save_to_disk wrote, its arrow files alone (the JSON is no data)."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names: list[str] = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        wanted = source.split or "train"
        if wanted not in names:
            raise _refused(source, f"it has the splits {', '.join(names)}, not {wanted}", "Set `split`.")
        return _files_of_saved_data_set(folder / wanted, source)
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    entries = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
    return [_local(folder / entry["filename"]) for entry in entries]


def _files_of_glob(path: Path, source: SourceConfig) -> list[DataFile]:
    root = Path(path.anchor) if path.is_absolute() else Path()
    pattern = str(path.relative_to(root)) if path.is_absolute() else str(path)
    found = [_local(file) for file in sorted(root.glob(pattern)) if file.is_file()]
    return _matched(found, source)


def _matched(found: list[DataFile], source: SourceConfig) -> list[DataFile]:
    """Every file that a pattern names, none passed over."""
    _refuse_split_of_a_file(source)
    if not found:
        whole = "://" in source.path or Path(source.path).is_absolute()
        where = "" if whole else f" in {Path.cwd()}"
        raise _refused(source, f"no file matches it{where}")
    strange = [file.name for file in found if file.suffix not in SUFFIXES]
    if strange:
        why = (
            f"it matches {len(found)} files, and {len(strange)} of them are no data: {', '.join(strange[:5])}"
        )
        raise _refused(source, why, "Narrow the pattern, e.g. *.jsonl.")
    return found


def _files_of_address(source: SourceConfig) -> list[DataFile]:
    """Files behind an fsspec address (s3://, gs://, hf://, https://, ...)."""
    import fsspec

    scheme = source.path.partition("://")[0]
    if scheme == "hf" and not hub.reachable():
        raise _refused(source, f"{hub.endpoint()} cannot be reached", "Download it where there is a network.")
    try:
        system, path = fsspec.core.url_to_fs(source.path)
        if GLOB.search(path):
            return _matched([_remote(system, name) for name in sorted(system.glob(path))], source)
        if system.isfile(path):
            _refuse_split_of_a_file(source)
            return [_remote(system, path)]
        inside = sorted(system.find(path))
        if not inside:
            raise _refused(source, "there is no such file or folder")
        names = {name.removeprefix(path).lstrip("/"): _remote(system, name) for name in inside}
    except Refusal:
        raise
    except Exception as error:
        why = f"{scheme}:// could not be read: {str(error).strip() or type(error).__name__}"
        fix = "Check the address, the network and your credentials"
        raise _refused(source, why, f"{fix}; {scheme}:// may need a package of its own.") from error
    return _chosen(names, source.path, source)


def _remote(system: AbstractFileSystem, path: str) -> DataFile:
    return DataFile(system.unstrip_protocol(path), path, system)


def _chosen(inside: dict[str, DataFile], folder: str, source: SourceConfig) -> list[DataFile]:
    """Of a folder's files, given by their names inside it, those of the wanted split."""
    files = {
        name: file
        for name, file in inside.items()
        if file.suffix in SUFFIXES and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    }
    if not files:
        why = f"no data files in {folder} ({len(inside)} other files)"
        raise _refused(source, why, f"Known endings: {KNOWN}.")
    splits = {name: _split_of(name) for name in files}
    if not any(splits.values()):
        if source.split not in (None, "train"):
            raise _refused(source, f"no file of {folder} has split={source.split} in its name")
        return list(files.values())
    wanted = SPLIT_OF.get(source.split or "train", source.split or "train")
    chosen = [file for name, file in files.items() if splits[name] == wanted]
    if not chosen:
        why = f"no file of split {wanted} among {', '.join(list(files)[:10])}"
        raise _refused(source, why, "Set `split`, or give one file.")
    return chosen


def _split_of(name: str) -> str | None:
    stem = name.lower().removesuffix(".gz").removesuffix(".zst").removesuffix(_suffix(name))
    words = SPLIT_WORD.findall(stem)
    return SPLIT_OF.get(words[-1], words[-1]) if words else None


@contextmanager
def _decompressed(path: str, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix == ".gz":
        with gzip.open(raw) as stream:
            yield stream  # type: ignore[misc]
    elif suffix == ".zst":
        import pyarrow

        with io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")) as stream:
            yield stream
    else:
        yield raw


def _refuse_split_of_a_file(source: SourceConfig) -> None:
    if source.split not in (None, "train"):
        why = f"split={source.split} has no meaning for single files"
        raise _refused(source, why, "Give the files of that split as `path`.")


def _refused(source: SourceConfig, why: str, fix: str = "") -> Refusal:
    return refuse(f"data source {source.path}", why, fix, subject=SUBJECT)
