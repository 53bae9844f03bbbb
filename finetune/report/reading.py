"""What is there to be read of a run's folder, what of it is missing, and what cannot be read?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import is_ours
from finetune.paths import RunDir
from finetune.report.answers import Answers, read_answers
from finetune.report.metrics import Metrics, number, read_metrics
from finetune.report.times import Start, read_starts
from finetune.secrets import masked

RECORDS = {
    "config.yaml": "what was asked for is not known",
    "plan.json": "",
    "data.json": "the statistics of the data are not known",
    "environment.json": "versions and machine are not known",
    "facts.json": "",
}
"""Files of a run beside its report, and what it means that one is lost; empty: another file may tell what it
told.
"""
NO_WORDS = "it left no words"


@dataclass(frozen=True, slots=True)
class Reading:
    """A run as far as its folder tells of it; what is missing is empty. No text in it holds a secret."""

    run_dir: RunDir
    report: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    facts: dict[str, Any]
    metrics: Metrics
    answers: Answers
    starts: list[Start]
    failures: dict[str, str]
    """What each rank said of its failure, by the name of its file."""
    held: bool
    """A process of this machine holds the folder: it may still prepare the run, or look back at it."""
    missing: list[str]

    @property
    def running(self) -> bool:
        """Whether the processes of its last start are at work."""
        return self.held and bool(self.starts) and self.starts[-1].ended is None

    @property
    def status(self) -> str:
        """`completed`, `interrupted` or `failed` as the run says itself; else `running` or `not known`.

        A run says `failed` from its last step on, until its model is saved and verified.
        """
        said = self.report.get("status")
        if isinstance(said, str) and not self.running:
            return said
        return "running" if self.held else "not known"

    @property
    def unplanned(self) -> bool:
        """Whether the run says that nothing was planned."""
        return _is_unplanned(self.report)

    @property
    def own_words(self) -> str:
        """Why the run says that it ended, where it knew: no library's traceback; empty: it did not."""
        # in a world that another launcher made the last rank to fail has written the error
        words = [self.report.get("error"), *self.failures.values()]
        known = (told for told in words if isinstance(told, str) and told != NO_WORDS)
        return next(filter(is_ours, known), "")

    @property
    def strategy(self) -> Any:
        return at(self.report, "strategy", "actual") or self.facts.get("strategy")

    @property
    def processes(self) -> int | None:
        found = at(self.report, "num_processes", "actual") or self.facts.get("num_processes")
        return found if isinstance(found, int) else None


def read_run(run_dir: RunDir) -> Reading:
    """Read all of it, whatever state it is in."""
    missing: list[str] = []
    held = _is_held(run_dir.lock)
    report = _record(run_dir.report, missing, "how the run ended is not known", may_lack=held)
    may_lack = {run_dir.plan.name} if _is_unplanned(report) else set()
    records = {
        name: _record(run_dir.path / name, missing, lost, may_lack=name in may_lack)
        for name, lost in RECORDS.items()
    }
    metrics = read_metrics(run_dir.metrics)
    answers = read_answers(run_dir.samples)
    missing += [*metrics.notes, *answers.notes]
    failures = {}
    for file in sorted(run_dir.logs.glob("rank-*.failed.json")):
        told = _record(file, missing, "it went away just now").get("told")
        failures[file.name.split(".")[0]] = str(told) if told else NO_WORDS
    return Reading(
        run_dir=run_dir,
        report=report,
        config=records["config.yaml"],
        plan=records["plan.json"],
        data=records["data.json"],
        environment=records["environment.json"],
        facts=records["facts.json"],
        metrics=metrics,
        answers=answers,
        starts=read_starts(run_dir),
        failures=failures,
        held=held,
        missing=missing,
    )


def at(node: Any, *names: str) -> Any:
    """The value at the end of these names; None where one of them is not there."""
    for name in names:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _is_unplanned(report: dict[str, Any]) -> bool:
    memory = report.get("memory")
    return isinstance(memory, dict) and "planned_bytes" in memory and memory["planned_bytes"] is None


def _record(path: Path, missing: list[str], lost: str, *, may_lack: bool = False) -> dict[str, Any]:
    """What the file holds; what is wrong with it is added to `missing`, unless the run may do without it."""
    parse: Callable[[str], Any] = yaml.safe_load if path.suffix == ".yaml" else json.loads
    try:
        text = path.read_text(encoding="utf-8")
        content = parse(text)
    except FileNotFoundError:
        if not may_lack:
            missing.append(f"{path.name} is not there{': ' if lost else ''}{lost}.")
        return {}
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}.")
        return {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        missing.append(f"{path.name} cannot be read, it may be half written: {masked(first)}.")
        return {}
    if content is not None and path.suffix == ".yaml" and not text.endswith("\n"):
        # half of it may be YAML too, and would be taken for a config of fewer keys
        missing.append(f"{path.name} cannot be read, it may be half written: its last line has no end.")
        return {}
    if not isinstance(content, dict):
        what = "it holds nothing" if content is None else "it holds no lines of the form `name: value`"
        missing.append(f"{path.name} cannot be read, it may be half written: {what}.")
        return {}
    return _masked(content)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {masked(str(name)): _masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    if value is None or isinstance(value, bool) or number(value) is not None:
        return value
    return masked(str(value))  # a text; or NaN, infinity, a date: JSON has no word for them


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine holds the run's folder: looked up, since to try the lock is to take
    it.
    """
    try:
        file, held = lock.stat(), Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(name in line.split() for line in held.splitlines())
