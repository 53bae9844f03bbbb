"""What a user sees of a run while it goes on: at a terminal, through a pipe, and in what is kept of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.front_door import environment, processes_of, started, wait_for_step

STEPS = 4
RUN = (
    *("recipe=tiny_lora", "launch.device=cpu", f"trainer.max_steps={STEPS}"),
    *("trainer.eval_strategy=steps", f"trainer.eval_steps={STEPS}"),
)
CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def at_terminal(folder: Path, name: str, **variables: str) -> str:
    """All that a terminal of 80 columns gets of a short run in it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [*RUN, "data.eval_fraction=0.1", f"run_name={name}", f"output_dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"TERM": "xterm"} | variables,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            block = os.read(ours, 2**16)
        except OSError:  # Linux's way to say that everybody has closed it
            break
        if not block:
            break
        seen += block
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode("utf-8")


def on_screen(seen: str) -> list[str]:
    """The lines that stand there in the end: a carriage return begins one anew, a control word clears it."""
    lines = []
    for line in seen.split("\n"):
        shown = ""
        for part in line.rstrip("\r").split("\r"):
            cleared = part.startswith("\x1b[K")
            part = CONTROL.sub("", part)
            shown = part if cleared else part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's folder, and what was seen of it."""
    folder = tmp_path_factory.mktemp("watched")
    return folder / "here", at_terminal(folder, "here")


def test_a_bar_stands_below_the_table_and_leaves_nothing_behind(watched: tuple[Path, str]) -> None:
    _, seen = watched
    assert re.search(rf"training .*[1-{STEPS}]/{STEPS} steps", seen), "no bar was drawn"
    lines = on_screen(seen)
    assert not [line for line in lines if " left" in line and "steps" in line and "training" in line]
    head = next(line for line in lines if line.split()[:2] == ["step", "loss"])
    rows = [line for line in lines if re.match(rf" *\d/{STEPS} ", line)]
    assert [row.split()[0] for row in rows] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert {len(row) for row in rows} == {len(head)}, "columns and head are one table"
    assert len(head) <= 80
    titles, values = head.split(), rows[-1].split()
    assert titles == ["step", "loss", "grad", "rate", "tok/s/dev", "GB", "learnt", "left"]
    last = dict(zip(titles, values, strict=True))
    assert last["left"] == "0:00"


def test_the_table_says_what_metrics_keep(watched: tuple[Path, str]) -> None:
    run, seen = watched
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry]
    rows = [line.split() for line in on_screen(seen) if re.match(rf" *\d/{STEPS} ", line)]
    for step, row in zip(steps, rows, strict=True):
        assert row[1] == f"{step['loss']:.4f}"
        assert row[4] == f"{step['tokens_per_second']:,.0f}"
        assert row[5] == f"{step['memory_resident_bytes'][0] / 1e9:.1f}"
        assert row[6] == str(step["supervised_tokens"])
        assert 0 < step["rank_seconds"][0] < 60
    losses = [f"eval      loss {entry['eval_loss']:.4f}" for entry in entries if "eval_loss" in entry]
    assert losses
    assert all(any(line.startswith(loss) for line in on_screen(seen)) for loss in losses)


def test_the_log_of_a_rank_holds_lines_alone(watched: tuple[Path, str]) -> None:
    kept = (watched[0] / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert f"{STEPS}/{STEPS}" in kept
    assert "\x1b" not in kept
    assert "\r" not in kept


def test_the_same_rows_are_answered_before_the_first_step_and_at_the_evaluation(
    watched: tuple[Path, str],
) -> None:
    lines = [json.loads(line) for line in (watched[0] / "samples.jsonl").read_text().splitlines()]
    first, last = ([line for line in lines if line["step"] == step] for step in (0, STEPS))
    assert len(first) == len(last) == 3
    assert [line["prompt"] for line in first] == [line["prompt"] for line in last]
    assert all(line["reference"].startswith("Arr!") for line in first)
    assert [line["answer"] for line in first] != [line["answer"] for line in last], "nothing was learnt"


def test_the_end_names_the_page(watched: tuple[Path, str]) -> None:
    run, seen = watched
    assert f"report    {run / 'report.html'}" in on_screen(seen)


def test_a_dumb_terminal_gets_lines_without_control_words(tmp_path: Path) -> None:
    seen = at_terminal(tmp_path, "dumb", TERM="dumb", NO_COLOR="1")
    assert "\x1b" not in seen
    assert "\r" not in seen.replace("\r\n", "\n")
    assert f"{STEPS}/{STEPS} " in seen


@pytest.mark.slow
def test_the_slowest_of_two_processes_is_named(tmp_path: Path) -> None:
    words = ("recipe=tiny_lora", "launch.device=cpu", "launch.num_processes=2", "trainer.max_steps=30")
    slow = 1
    with started(*words, at=tmp_path) as (process, outcome):
        wait_for_step(outcome.path, 1)
        (worker,) = (
            one
            for one in processes_of(outcome.path)
            if "finetune.training.worker" in one.cmdline() and one.environ().get("RANK") == str(slow)
        )
        held = json.loads((outcome.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])[
            "step"
        ]
        while process.poll() is None and len(outcome.steps) < 25:
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.03)
            worker.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        assert process.wait(timeout=60) == 0
    assert outcome.report["num_processes"] == {"requested": 2, "actual": 2}
    assert outcome.report["strategy"]["actual"] == "ddp"
    while_held = [step["slowest_rank"] for step in outcome.steps if held + 1 < step["step"] < 25]
    assert len(while_held) > 10, while_held
    assert while_held.count(slow) >= 0.8 * len(while_held), while_held
