"""How well do a model and its base predict held-out rows, and what do they answer? The parent's part."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.batch import Batch
from finetune.config.rules import RunFacts
from finetune.config.schema import DistributedConfig, LaunchConfig, Strategy
from finetune.data.documents import Documents, question_of, room_for
from finetune.distributed.accelerate import launch_file, write_launch_file
from finetune.distributed.launch import Workers
from finetune.errors import Problem, Refusal, RunFailed
from finetune.inference.harness import check_tasks
from finetune.inference.job import NLL, RIGHT, TOKENS, Job, figures_file
from finetune.inference.metrics import find_metrics
from finetune.inference.rows import HeldOut, held_out_rows, no_rows
from finetune.inference.subject import Subject, find_subject
from finetune.inference.summary import judged, summary
from finetune.logs import without_noise
from finetune.model.fetch import fetch_model
from finetune.model.limits import model_limits
from finetune.paths import RunDir
from finetune.progress import tell
from finetune.report.cells import evaluation_cell
from finetune.report.evaluation_text import evaluation_lines
from finetune.short_lived import short_lived

SAMPLES = 100
"""Rows that are answered, unless another number is asked for."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of it."""

    record: dict[str, Any]
    """What `finetune evaluate --json` prints."""
    answers: dict[str, list[dict[str, Any]]]
    """Of each model: `row`, `prompt`, `reference`, `answer`, `tokens`, `finished`, and `metrics`."""

    def __repr__(self) -> str:
        return "\n".join(evaluation_lines(self.record))

    def _repr_html_(self) -> str:
        return evaluation_cell(self.record)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The rows that are answered."""

    rows: tuple[int, ...] = ()
    max_new_tokens: int = 0
    without: int = 0
    """Rows among those chosen that hold no question: they are learnt whole."""
    too_long: int = 0
    """Rows whose answer would not fit behind their question."""


def evaluate(
    run: str | os.PathLike[str] | None = None,
    *overrides: str,
    samples: int = SAMPLES,
    metrics: Sequence[str] = (),
    tasks: Sequence[str] = (),
    bits: int | None = None,
    max_new_tokens: int | None = None,
    say: Say = tell,
) -> Evaluation:
    """Measure a run, a checkpoint, an adapter or a model, and its base, on the rows that it did not learn.

    Args:
        run: a folder, or a `Run`; null: the overrides name a model.
        samples: rows that are answered by generation, spread evenly over the rows.
        metrics: further ones, by name (`final_number`) or as `module:function`.
        tasks: of lm-evaluation-harness, by name or as a YAML file.
        bits: 4 or 8: the base is quantised while it is loaded.
        max_new_tokens: of an answer; null: twice the longest reference.

    Raises:
        Refusal: the model, the rows or the words must be changed first.
        RunFailed: a process failed.
    """
    problems: list[Problem] = []
    wanted = find_metrics(list(metrics), problems)
    if samples < 0:
        problems.append(Problem(f"--samples {samples}", "expected 0 (none) or more"))
    if max_new_tokens is not None and max_new_tokens < 1:
        problems.append(Problem(f"--max-new-tokens {max_new_tokens}", "expected 1 or more"))
    subject = _found(run, overrides, bits, problems)
    check_tasks(tasks, problems)
    if problems:
        raise Refusal(problems, subject.word or subject.composed.subject)
    for line in (*subject.composed.notes, *subject.lines):
        say(line)
    for model in {model.name_or_path: model for model in _models(subject)}.values():
        fetch_model(model)
    rows = held_out_rows(subject)
    if rows is None and not tasks:
        raise no_rows(subject)
    documents = Documents.in_file(rows.file) if rows is not None else None
    for line in rows.lines if rows is not None else ["rows      none are named: only tasks are run"]:
        say(line)
    asked = _choose(documents, subject, samples, max_new_tokens) if documents is not None else _Asked()
    for line in _told(asked):
        say(line)
    with short_lived("finetune-evaluation-") as folder:
        _measure(subject, rows, len(documents) if documents is not None else 0, asked, tasks, folder, say)
        answers = {name: judged(folder, name, wanted) for name in subject.names}
        length = asked.max_new_tokens if asked.rows else None
        record = summary(subject, rows, length, answers, wanted, folder)
    return Evaluation(record, answers)


def _found(
    run: str | os.PathLike[str] | None, overrides: Sequence[str], bits: int | None, problems: list[Problem]
) -> Subject:
    try:
        return find_subject(run, overrides, bits=bits)
    except Refusal as refusal:
        raise Refusal([*problems, *refusal.problems], refusal.subject) from None


def _models(subject: Subject) -> list[Any]:
    tuned = [subject.tuned.model] if subject.tuned is not None else []
    return [*tuned, *([subject.base] if subject.base is not None else [])]


def _choose(documents: Documents, subject: Subject, samples: int, max_new_tokens: int | None) -> _Asked:
    """Rows spread evenly, each with a question, and room for the answer."""
    chosen = [stretch[0] for stretch in documents.stretches(samples)]
    found = {row: question for row in chosen if (question := question_of(*documents[row])) is not None}
    if not found:
        return _Asked(without=len(chosen))
    length = max_new_tokens or room_for(found.values())
    positions = model_limits(subject.speaks).positions or math.inf
    fitting = tuple(row for row, question in found.items() if len(question.prompt) + length <= positions)
    return _Asked(fitting, length, len(chosen) - len(found), len(found) - len(fitting))


def _told(asked: _Asked) -> list[str]:
    lines = []
    if asked.rows:
        count, length = len(asked.rows), asked.max_new_tokens
        lines.append(f"answers   to {count:,} rows, greedy, of at most {length} tokens")
    if asked.without:
        lines.append(f"          {asked.without:,} rows hold no question: they are learnt from their start")
    if asked.too_long:
        lines.append(
            f"          {asked.too_long:,} rows leave no room for an answer in the model's positions"
        )
    return lines


def _measure(
    subject: Subject,
    rows: HeldOut | None,
    count: int,
    asked: _Asked,
    tasks: Sequence[str],
    folder: Path,
    say: Say,
) -> None:
    """In this process, or shared out among several."""
    job = Job(
        run=subject.word,
        model_words=subject.model_words,
        base=asdict(subject.base) if subject.base is not None else None,
        base_inside=subject.base_inside,
        weights=subject.weights,
        rows=str(rows.file) if rows is not None else None,
        batch_size=subject.batch_size,
        questions=asked.rows,
        max_new_tokens=asked.max_new_tokens,
        tasks=tuple(str(Path(task).absolute()) if Path(task).is_file() else task for task in tasks),
    )
    for name in job.names if count else ():
        file, kind = figures_file(folder, name), np.float64
        empty = np.lib.format.open_memmap(
            file, mode="w+", dtype=kind, shape=(count, len((NLL, TOKENS, RIGHT)))
        )
        empty[:] = np.nan  # a row that no process wrote must not count as one that was predicted
        empty.flush()
    processes = _processes(subject, count)
    if processes == 1:
        with without_noise():
            from finetune.inference.measure import measure  # torch: after the checks

            measure(job, folder, 0, 1)
        return
    say(f"processes {processes}")
    job.save(folder)
    _in_processes(subject, processes, folder, say)


def _processes(subject: Subject, count: int) -> int:
    """No more than there are batches, unless the number was typed."""
    if subject.processes_given:
        return subject.num_processes
    return max(1, min(subject.num_processes, -(-count // subject.batch_size)))


def _in_processes(subject: Subject, processes: int, folder: Path, say: Say) -> None:
    run_dir, launch = RunDir(folder), LaunchConfig(num_processes=processes)
    facts = _facts(subject, processes)
    write_launch_file(run_dir.accelerate, launch_file(facts, launch, DistributedConfig()))
    try:
        with Workers(run_dir, facts, launch, relay=say, module="finetune.inference.worker") as workers:
            ended = workers.wait_or_leave()
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None  # as where one process does it all
        raise
    if ended.exit_code:
        who = f"process {ended.failed_rank} failed first" if ended.failed_rank is not None else "it failed"
        raise RunFailed(f"{who}: {ended.told}", ended.exit_code)


def _facts(subject: Subject, processes: int) -> RunFacts:
    """What the launcher asks of a run; nothing is trained in it."""
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[subject.weights.dtype]
    return RunFacts(
        requested_strategy=Strategy.ddp,
        strategy=Strategy.ddp,
        device=subject.weights.device,
        num_processes=processes,
        batch=Batch(per_device=subject.batch_size, processes=processes, accumulation=1),
        precision=precision,
        precision_reason="",
        trained_dtype="float32",
        frozen_dtype=subject.weights.dtype,
        learning_rate=0.0,
        positions=None,
        notes=(),
    )
