"""A run as a user would start it, end it and go on with it, in a folder that goes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.config.compose import Composed
from finetune.config.schema import Strategy
from finetune.distributed.family import kill_family
from finetune.distributed.parent import end_with_parent
from finetune.paths import RunDir
from finetune.rehearse.twin_config import RUN_NAME

FOLDER = "finetune-rehearsal-"
"""What the name of the folder begins with, in TMPDIR."""
PROCESSES = 2
PATIENCE_SECONDS = 900.0
"""For one start of a run: the first one under DeepSpeed compiles for about 90 s."""
SAME = 1e-6
"""Largest relative difference between a step and its repetition after the resume: rounding explains no more,
since the same processes do the same arithmetic.
"""
MERGED_TO = "float32"
"""The logits of random weights are hardly larger than what rounding to 16 bits moves them by: it would hide a
wrong merge, and fail a right one.
"""
ALLOWED = 1e-3
"""Largest difference of logits that the order of additions explains, as a share of the largest one."""
LAST_LINES = 8


class StageFailed(Exception):
    """A stage did not come out right; the message says what was seen."""


@dataclass(slots=True)
class Play:
    """What the stages hand on."""

    overrides: list[str]
    folder: Path
    """Everything that is written lies in it."""
    composed: Composed | None = None
    strategy: Strategy = Strategy.auto
    processes: int = PROCESSES
    process: subprocess.Popen[str] | None = None
    before: list[dict[str, Any]] = field(default_factory=list)
    """The steps that were logged before the kill."""
    merged: Path | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """What was seen when both were opened."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / RUN_NAME)

    @property
    def recipe(self) -> Path:
        return self.folder / "twin.yaml"

    def finetune(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`python -m finetune WORDS` to its end."""
        return self.python("-m", "finetune", *words)

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A Python process to its end, with what it has printed."""
        self.process = process = self._started(words, subprocess.PIPE, subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise StageFailed(f"it had not ended after {PATIENCE_SECONDS:.0f} s") from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def start(self) -> None:
        """Begin the run."""
        with self._log.open("w", encoding="utf-8") as log:
            self.process = self._started(("-m", "finetune", "train", f"recipe={self.recipe}"), log, log)

    def _started(self, words: Sequence[str], out: Any, err: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=package_environment(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            preexec_fn=end_with_parent,
        )

    def wait(self, come: Callable[[], bool], what: str) -> None:
        """Until it has come; a run that ends before that has failed."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not come():
            if self.process.poll() is not None and not come():
                raise StageFailed("\n".join(self.own_words()[-LAST_LINES:]))
            if time.monotonic() > deadline:
                raise StageFailed(f"no {what} within {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """End what runs, with all of its processes, none of which hears of it."""
        if self.process is not None:
            kill_family(self.process)

    def steps(self) -> list[dict[str, Any]]:
        """The optimizer steps that are logged."""
        return logged_steps(self.run)

    @property
    def steps_made(self) -> int:
        return max((step["step"] for step in self.steps()), default=0)

    def own_words(self) -> list[str]:
        """What the run has printed."""
        return spoken(self._log.read_text(encoding="utf-8", errors="replace"))

    @property
    def _log(self) -> Path:
        return self.folder / "train.log"


def spoken(text: str) -> list[str]:
    """The lines that say something: no blank ones, and no marks below a line of code."""
    return [line for line in text.splitlines() if line.strip(" ^~")]


def last_words(text: str) -> str:
    """How what a process printed ends; empty: it printed nothing."""
    return "\n".join(spoken(text)[-LAST_LINES:])


def logged_steps(run: RunDir) -> list[dict[str, Any]]:
    """The optimizer steps of metrics.jsonl: its whole lines, while it may still be written."""
    if not run.metrics.exists():
        return []
    lines = run.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if "loss" in entry]


def refuse_difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Steps that were made twice have to come out the same."""
    again = {step["step"]: step for step in after}
    for name in ("learning_rate", "loss", "grad_norm"):
        for step in before:
            first, second = step[name], again.get(step["step"], {}).get(name)
            if second is None or not abs(first - second) <= SAME * abs(first):
                at = f"{name} of step {step['step']}"
                raise StageFailed(f"{at} was {first} the first time, and is {second} after the resume")


def refuse_apart(told: dict[str, Any]) -> None:
    """Two ways to the same model (what `opened` saw of them) have to agree."""
    if not told["difference"] <= ALLOWED:
        raise StageFailed(f"logits of model/ and of the merged model are {told['difference']:.1e} apart")


def package_environment(folder: Path) -> dict[str, str]:
    """This environment, with this package and the modules that lie where the person started (a format of
    their own may be one of them); what is cached and left over goes with the folder.
    """
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
    left = {"FINETUNE_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **left}
