"""Reads, converts and encodes all sources of a split, in several processes when the rows are many."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

from finetune.config.schema import DataConfig, SourceConfig
from finetune.data.encode import Encoded, Encoder
from finetune.data.format import Layout, convert, recognise
from finetune.data.load import CHUNK_ROWS, SUBJECT, Chunk, read, refuse_rows
from finetune.errors import Problem, RunFailed, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS_PER_PROCESS = 2000
SHOWN = 20
INSEPARABLE = "a token holds words of both an answer and the chat template"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is read and not trained on."""

    reason: str
    index: int
    place: str
    tokens: int = 0


@dataclass(slots=True)
class Rows:
    """All rows of one list of sources: ids one behind the other, and where each row came from."""

    ids: np.ndarray
    learnt: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    """Where each row begins in `ids`."""
    indices: np.ndarray
    """0-based place among the rows read."""
    numbers: np.ndarray
    files: np.ndarray
    """Which of `places` each row came from."""
    places: list[str]
    """File and unit, e.g. `train.jsonl line`."""
    read: int
    dropped: list[Dropped]
    layouts: list[tuple[str, Layout]]
    """(file, how it was read), one per file."""
    shared_tokens: int

    def place(self, row: int) -> str:
        """Where a row came from, for people."""
        return f"{self.places[self.files[row]]} {self.numbers[row]}"


@dataclass(frozen=True, slots=True)
class _Job:
    chunk: Chunk
    layout: Layout
    first_index: int


@dataclass(slots=True)
class _Done:
    encoded: Encoded
    dropped: list[tuple[str, int, int]]
    problems: list[Problem] = field(default_factory=list)


def gather(sources: list[SourceConfig], data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Read every row of the sources, or refuse them with all bad rows named."""
    layouts: list[tuple[str, Layout]] = []
    places: list[str] = []
    parts: list[Encoded] = []
    files: list[np.ndarray] = []
    dropped: list[Dropped] = []
    problems: list[Problem] = []
    bad = rows_read = 0
    for job, done in _results(_jobs(sources, data, tokenizer, layouts), data, tokenizer):
        place = f"{job.chunk.file} {job.chunk.unit}"
        if not places or places[-1] != place:
            places.append(place)
        rows_read += len(job.chunk.items)
        bad += len(done.problems)
        problems += done.problems[: SHOWN - len(problems)]
        dropped += [Dropped(reason, index, f"{place} {number}") for reason, index, number in done.dropped]
        if not bad:
            parts.append(done.encoded)
            files.append(np.full(len(done.encoded.lengths), len(places) - 1, np.int32))
    if bad:
        raise refuse_rows(problems, bad)
    lengths = _joined([part.lengths for part in parts], np.int64)
    return Rows(
        ids=_joined([part.ids for part in parts], np.int32),
        learnt=_joined([part.learnt for part in parts], bool),
        lengths=lengths,
        starts=np.cumsum(lengths) - lengths,
        indices=_joined([part.indices for part in parts], np.int64),
        numbers=_joined([part.numbers for part in parts], np.int64),
        files=_joined(files, np.int32),
        places=places,
        read=rows_read,
        dropped=dropped,
        layouts=layouts,
        shared_tokens=sum(part.shared_tokens for part in parts),
    )


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _jobs(
    sources: list[SourceConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    layouts: list[tuple[str, Layout]],
) -> Iterator[_Job]:
    index = 0
    for source in sources:
        of_source: list[tuple[str, Layout]] = []
        for chunk in read(source):
            if not of_source or of_source[-1][0] != chunk.file:
                layout = recognise(source, chunk, bool(tokenizer.chat_template), data.loss_on)
                _refuse_chat_without_template(layout, chunk.file, tokenizer)
                of_source.append((chunk.file, layout))
                _refuse_mixture(of_source[0], of_source[-1], "format")
                layouts.append(of_source[-1])
                _refuse_mixture(layouts[0], layouts[-1], "form")
            yield _Job(chunk, of_source[-1][1], index)
            index += len(chunk.items)


def _refuse_chat_without_template(layout: Layout, file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    if not layout.chat or tokenizer.chat_template:
        return
    column = next(iter(layout.columns.values()))
    raise refuse(
        f"model {tokenizer.name_or_path}",
        f"its tokenizer has no chat template, and column '{column}' of {file} holds conversations",
        "Give one: model.chat_template=PATH.jinja. Plain text and prompt-completion rows need none.",
        subject="model and data",
    )


def _refuse_mixture(first: tuple[str, Layout], other: tuple[str, Layout], what: str) -> None:
    a, b = (first[1].format, other[1].format) if what == "format" else (first[1].form, other[1].form)
    if a == b:
        return
    columns = [
        f"{file} has the columns {', '.join(layout.found)} ({layout})" for file, layout in (first, other)
    ]
    fix = (
        "Files of one source must have one format."
        if what == "format"
        else "All sources must give one kind of row."
    )
    raise refuse(
        columns[0], columns[1], f"{fix} Train on one of them, or convert the other.", subject=SUBJECT
    )


def _results(
    jobs: Iterable[_Job], data: DataConfig, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[_Job, _Done]]:
    jobs = iter(jobs)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    first = list(islice(jobs, max(2, cores) * -(-ROWS_PER_PROCESS // CHUNK_ROWS)))
    num_rows = sum(len(job.chunk.items) for job in first)
    processes = data.num_proc or min(cores, num_rows // ROWS_PER_PROCESS)
    if processes > 1 and len(first) > 1 and sys.platform == "linux":
        yield from _in_processes(chain(first, jobs), processes, data, tokenizer)
        return
    encoder = Encoder(tokenizer, data.loss_on)
    for job in chain(first, jobs):
        yield job, _run(job, encoder)


def _in_processes(
    jobs: Iterator[_Job], processes: int, data: DataConfig, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[_Job, _Done]]:
    """Fork: the children need neither imports nor the caller's main module, and this process has no CUDA."""
    waiting: deque[tuple[_Job, Future[_Done]]] = deque()
    start = get_context("fork")
    with ProcessPoolExecutor(processes, start, _start_child, (tokenizer, data)) as pool:
        try:
            for job in jobs:
                waiting.append((job, pool.submit(_run_in_child, job)))
                if len(waiting) > 2 * processes:
                    done_job, future = waiting.popleft()
                    yield done_job, future.result()
            while waiting:
                done_job, future = waiting.popleft()
                yield done_job, future.result()
        except BrokenProcessPool as error:
            why = "a process that tokenises was ended from outside, most likely for lack of memory"
            raise RunFailed(f"{why}. Try data.num_proc=1.") from error


_encoder: Encoder | None = None


def _start_child(tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _encoder = Encoder(tokenizer, data.loss_on)


def _run_in_child(job: _Job) -> _Done:
    assert _encoder is not None
    return _run(job, _encoder)


def _run(job: _Job, encoder: Encoder) -> _Done:
    converted = convert(job.chunk, job.layout, job.first_index)
    if converted.problems:
        return _Done(Encoded(), converted.dropped, converted.problems)
    encoded = encoder.encode(converted.examples)
    problems = [job.chunk.problem(*bad) for bad in encoded.bad]
    dropped = converted.dropped + [(INSEPARABLE, index, number) for index, number in encoded.inseparable]
    return _Done(encoded, dropped, problems)
