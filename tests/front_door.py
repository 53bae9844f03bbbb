"""How tests use the product: its command line in real processes, and its Python API inside real worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command printed, how it ended, and the run's folder."""

    code: int
    out: str
    err: str
    path: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.path / "report.json").read_text(encoding="utf-8"))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The logged optimizer steps."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [entry for entry in map(json.loads, lines) if "loss" in entry]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.steps]


def environment(**more: str) -> dict[str, str]:
    """One thread a process: the operations of a tiny model are too small to share, and waiting threads burn
    cores.
    """
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def finetune(*words: str, at: Path, name: str = "run", launcher: tuple[str, ...] = (), **env: str) -> Outcome:
    """Run `python -m finetune WORDS` (or the same through an outer launcher) in the folder `at`."""
    command = [sys.executable, "-m", *(launcher or ()), *(["-m"] if launcher else []), "finetune", *words]
    if not any(word.startswith("--") for word in words):
        command += [f"run_name={name}", f"output_dir={at / 'runs'}"]
    done = subprocess.run(
        command, cwd=at, env=environment(**env), capture_output=True, text=True, timeout=150, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr, at / "runs" / name)


@contextmanager
def started(
    *words: str, at: Path, name: str = "run", **env: str
) -> Iterator[tuple[subprocess.Popen[str], Outcome]]:
    """A run that goes on while the test looks at it; nothing of it is left afterwards."""
    outcome = Outcome(0, "", "", at / "runs" / name)
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *words, f"run_name={name}", f"output_dir={at / 'runs'}"],
        cwd=at,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, outcome
    finally:
        for left in processes_of(outcome.path):
            left.kill()
        process.kill()
        process.wait()


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process whose command line names the run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(run) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def wait_for(what: str, there: Callable[[], bool], seconds: float = 120, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(pause)


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    wait_for(f"step {step}", lambda: steps_logged(run) >= step, seconds)


def steps_logged(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


def kill_all(process: subprocess.Popen[str]) -> None:
    """End a run as a machine that loses its power does: every process at once, none hears of it."""
    parent = psutil.Process(process.pid)
    for one in [parent, *parent.children(recursive=True)]:
        try:
            one.kill()
        except psutil.Error:
            continue
    process.wait()


def assert_all_gone(run: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(run) == []


def in_world(cases: dict[str, list[str]], processes: int, at: Path) -> dict[str, Outcome]:
    """Run several cases in one launch: `finetune.train` again and again inside one world of torchrun's."""
    script = at / "cases.py"
    script.write_text(
        "import json, sys, finetune\n"
        "for name, words in json.loads(sys.argv[1]).items():\n"
        "    finetune.train(*words, f'run_name={name}')\n",
        encoding="utf-8",
    )
    common = [f"output_dir={at / 'runs'}", "launch.device=cpu"]
    words = {name: [*overrides, *common] for name, overrides in cases.items()}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    done = subprocess.run(
        [*torchrun, str(script), json.dumps(words)],
        cwd=at,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {name: Outcome(0, done.stdout, done.stderr, at / "runs" / name) for name in cases}


def relative_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference between two lists of losses of the same length."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
