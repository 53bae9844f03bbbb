"""What is there to be read of a run's folder, what of it is missing, and what cannot be read?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.paths import RunDir
from finetune.report.answers import Answers, read_answers
from finetune.report.metrics import Metrics, number, read_metrics
from finetune.report.times import Start, read_starts
from finetune.secrets import masked

RECORDS = {
    "report.json": ": how the run ended is not known",
    "config.yaml": ": what was asked for is not known",
    "plan.json": "",
    "data.json": ": the statistics of the data are not known",
    "environment.json": ": versions and machine are not known",
    "facts.json": "",
}
"""Files of a run, and what cannot be known without one; another file may tell what it told."""
NO_WORDS = "it left no words"
TRACEBACK = "Traceback (most recent call last)"


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
    running: bool
    missing: list[str]

    @property
    def status(self) -> str:
        """`completed`, `interrupted` or `failed` as the run says itself; else `running` or `not known`."""
        said = self.report.get("status")
        return said if isinstance(said, str) else "running" if self.running else "not known"

    @property
    def own_words(self) -> str:
        """Why the run says that it ended, where it knew: no library's traceback; empty: it did not."""
        error = self.report.get("error")
        words = [error] if isinstance(error, str) else list(self.failures.values())
        return next((told for told in words if told != NO_WORDS and TRACEBACK not in told), "")

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
    running = _at_work(run_dir.lock)
    records = {name: _record(run_dir.path / name, missing) for name in RECORDS}
    if running:
        missing = [note for note in missing if not note.startswith("report.json is not there")]
    metrics = read_metrics(run_dir.metrics)
    answers = read_answers(run_dir.samples)
    missing += [*metrics.notes, *answers.notes]
    failures = {}
    for file in sorted(run_dir.logs.glob("rank-*.failed.json")):
        told = _record(file, missing).get("told")
        failures[file.name.split(".")[0]] = str(told) if told else NO_WORDS
    return Reading(
        run_dir=run_dir,
        report=records["report.json"],
        config=records["config.yaml"],
        plan=records["plan.json"],
        data=records["data.json"],
        environment=records["environment.json"],
        facts=records["facts.json"],
        metrics=metrics,
        answers=answers,
        starts=read_starts(run_dir),
        failures=failures,
        running=running,
        missing=missing,
    )


def at(node: Any, *names: str) -> Any:
    """The value at the end of these names; None where one of them is not there."""
    for name in names:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _record(path: Path, missing: list[str]) -> dict[str, Any]:
    parse: Callable[[str], Any] = yaml.safe_load if path.suffix == ".yaml" else json.loads
    try:
        text = path.read_text(encoding="utf-8")
        content = parse(text)
    except FileNotFoundError:
        missing.append(f"{path.name} is not there{RECORDS.get(path.name, ': it went away just now')}.")
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


def _at_work(lock: Path) -> bool:
    """Whether a process of this machine holds the run's folder: looked up, since to try the lock is to take
    it.
    """
    try:
        file, held = lock.stat(), Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(name in line.split() for line in held.splitlines())
