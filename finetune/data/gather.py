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

from finetune.config.schema import DataConfig, SourceConfig, Thinking
from finetune.data.chunk import Chunk, refuse_rows
from finetune.data.convert import convert
from finetune.data.encode import Encoded, Encoder
from finetune.data.format import Layout, Wanted, recognise
from finetune.data.read import CHUNK_ROWS, read
from finetune.data.rows import Dropped, Place, Rows, RowWriter
from finetune.data.source import SUBJECT, passed_over
from finetune.errors import Problem, RunFailed, refuse
from finetune.hardware.cores import whole_cores
from finetune.model.tokenizer import reads_thoughts, thinking_switches
from finetune.progress import stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROWS_PER_PROCESS = 2000
SHOWN = 20
INSEPARABLE = "a token holds words of both an answer and the chat template"


@dataclass(frozen=True, slots=True)
class _Job:
    chunk: Chunk
    layout: Layout
    first_index: int
    source: int


@dataclass(slots=True)
class Quota:
    """How much of a streamed source is read; what was read so far is counted off."""

    rows: int
    tokens: int = 0
    """0: rows alone count."""
    max_length: int | None = None
    cut: bool = False
    """A longer row is cut; else it counts for nothing."""

    @property
    def full(self) -> bool:
        return self.rows <= 0 and self.tokens <= 0

    def count(self, rows: np.ndarray) -> None:
        limit = self.max_length if self.max_length is not None else np.iinfo(np.int64).max
        usable = (rows["supervised"] > 0) & (self.cut | (rows["length"] <= limit))
        self.rows -= int(usable.sum())
        self.tokens -= int(np.minimum(rows["length"], limit)[usable].sum())


@dataclass(slots=True)
class _Done:
    encoded: Encoded
    dropped: list[tuple[str, int, int]]
    problems: list[Problem] = field(default_factory=list)


def gather(
    sources: list[SourceConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    writer: RowWriter,
    quotas: list[Quota] | None = None,
) -> Rows:
    """Read every row of the sources (with `quotas`: no more than those), or refuse them with all bad rows
    named.
    """
    problems: list[Problem] = []
    bad = ahead = 0
    writer.notes += [note for source in sources for note in _passed_over(source)]
    results = _results(_jobs(sources, data, tokenizer, quotas), data, tokenizer)
    for job, done in _counted(results, writer.name):
        chunk = job.chunk
        if quotas is not None:
            if quotas[job.source].full:
                ahead += len(chunk.items)  # read before the count was known: as if it never were
                continue
            quotas[job.source].count(done.encoded.rows)
            done.encoded.rows["index"] -= ahead
        writer.read += len(chunk.items)
        bad += len(done.problems)
        problems += done.problems[: SHOWN - len(problems)]
        if bad:
            continue
        writer.dropped += [
            Dropped(reason, index - ahead, f"{chunk.file} {chunk.unit} {number}")
            for reason, index, number in done.dropped
        ]
        writer.add(Place(chunk.file, chunk.unit, job.source, job.layout), done.encoded)
    if bad:
        raise refuse_rows(problems, bad)
    return writer.finish()


def _counted(results: Iterable[tuple[_Job, _Done]], split: str) -> Iterator[tuple[_Job, _Done]]:
    with stage(f"preparing {split}", "rows") as preparing:
        for job, done in results:
            preparing.advance(len(job.chunk.items))
            yield job, done


def _jobs(
    sources: list[SourceConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    quotas: list[Quota] | None,
) -> Iterator[_Job]:
    has_template = bool(tokenizer.chat_template)
    apart = has_template and reads_thoughts(tokenizer)
    wanted = Wanted(has_template, apart, data.loss_on, data.thinking)
    if data.thinking is Thinking.mixed and has_template and not thinking_switches(tokenizer):
        why = "the chat template has no switch for thoughts, so that rows without one cannot say so"
        raise refuse("data.thinking=mixed", why, "Use keep or off.", subject=SUBJECT)
    index = 0
    seen: list[tuple[SourceConfig, str, Layout]] = []
    for number, source in enumerate(sources):
        file = None
        for chunk in read(source, streaming=quotas is not None):
            if quotas is not None and quotas[number].full:
                break
            if chunk.file != file:
                file = chunk.file
                layout = recognise(source, chunk, wanted)
                _refuse_chat_without_template(layout, file, tokenizer)
                seen.append((source, file, layout))
                _refuse_mixture(seen[0], seen[-1])
            yield _Job(chunk, layout, index, number)
            index += len(chunk.items)


def _passed_over(source: SourceConfig) -> list[str]:
    names = passed_over(source)
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return [f"{source.path}: not read: {shown} ({len(names)} files)"] if names else []


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


def _refuse_mixture(first: tuple[SourceConfig, str, Layout], other: tuple[SourceConfig, str, Layout]) -> None:
    """Rows of two formats are mixed only if the sources say so, and never those of two forms."""
    (source, file, layout), (other_source, other_file, other_layout) = first, other
    said = source is not other_source and source.format is not None and other_source.format is not None
    if layout.form == other_layout.form and (said or layout.format is other_layout.format):
        return
    if layout.form != other_layout.form:
        fix = "All sources must give one kind of row: train on one of them, or convert the other."
    elif source is other_source:
        fix = "Files of one source must have one format: give each file as a source of its own."
    else:
        fix = "If both are meant, say so with `format` on each source."
    first_columns, other_columns = (
        f"{name} has the columns {', '.join(it.found)} ({it})"
        for name, it in ((file, layout), (other_file, other_layout))
    )
    raise refuse(first_columns, other_columns, fix, subject=SUBJECT)


def _results(
    jobs: Iterable[_Job], data: DataConfig, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[_Job, _Done]]:
    jobs = iter(jobs)
    first = list(islice(jobs, 2 * ROWS_PER_PROCESS // CHUNK_ROWS))
    enough = sum(len(job.chunk.items) for job in first) >= 2 * ROWS_PER_PROCESS
    processes = data.num_proc or (whole_cores() if enough else 1)
    if processes > 1 and len(first) > 1 and sys.platform == "linux":
        yield from _in_processes(chain(first, jobs), processes, data, tokenizer)
        return
    encoder = Encoder(tokenizer, data)
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
    _encoder = Encoder(tokenizer, data)


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
