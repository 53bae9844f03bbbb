"""A run inside a notebook's kernel: drawn while it goes on, interrupted by the user, gone on with."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.front_door import assert_all_gone, environment, processes_of, steps_logged, wait_for

SECONDS = 240
"""For a cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell came to."""

    reply: dict[str, Any]
    messages: list[tuple[float, str, dict[str, Any]]]
    """When each came, its kind, its content."""

    @property
    def pictures(self) -> list[tuple[float, str, dict[str, Any]]]:
        return [one for one in self.messages if "image/png" in one[2].get("data", {})]

    @property
    def printed(self) -> str:
        return "".join(content["text"] for _, kind, content in self.messages if kind == "stream")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(cwd=str(tmp_path), env=environment())
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def end_of(client: BlockingKernelClient, asked: str) -> Cell:
    """Wait for the end of a cell, with all that it showed."""
    messages = []
    while True:
        message = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        messages.append((time.monotonic(), kind, content))
        if kind == "status" and content["execution_state"] == "idle":
            break
    while True:
        reply = client.get_shell_msg(timeout=SECONDS)
        if reply["parent_header"].get("msg_id") == asked:
            return Cell(reply["content"], messages)


@pytest.mark.slow
def test_an_interrupted_cell_keeps_a_checkpoint_and_says_how_to_go_on_in_the_same_kernel(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    run = tmp_path / "runs" / "stopped"
    words = ["recipe=tiny_lora", "launch.device=cpu", "launch.num_processes=2", "trainer.max_steps=40"]
    named = ", ".join(map(repr, [*words, "run_name=stopped"]))
    asked = client.execute(f"import finetune\nrun = finetune.train({named})")
    wait_for("step 2", lambda: steps_logged(run) >= 2, SECONDS)
    assert len([one for one in processes_of(run) if "finetune.training.worker" in one.cmdline()]) >= 2
    manager.interrupt_kernel()
    cell = end_of(client, asked)
    assert_all_gone(run)
    assert cell.reply["status"] == "error"
    assert cell.reply["ename"] == "RunFailed"
    told = "\n".join(cell.reply["traceback"])
    assert "Traceback" not in told
    steps = steps_logged(run)
    assert f"the run was stopped; its folder: {run}" in told
    assert f"It saved checkpoint-{steps}." in told
    assert (run / "checkpoints" / f"checkpoint-{steps}").is_dir()
    assert steps < 40

    going_on = re.search(r"finetune\.train\(.*\)", told)
    assert going_on is not None
    cell = end_of(client, client.execute(f"run = {going_on[0]}\nprint(len(run.metrics), repr(run))"))
    assert cell.reply["status"] == "ok", cell.reply
    assert f"40 Run {run}: completed" in cell.printed
    assert_drawn_in_one_place(cell)


def assert_drawn_in_one_place(cell: Cell) -> None:
    """One picture, made anew while the run went on and never twice within two seconds, the last aside."""
    assert len(cell.pictures) >= 2
    assert [kind for _, kind, _ in cell.pictures] == [
        "display_data",
        *["update_display_data"] * (len(cell.pictures) - 1),
    ]
    assert len({content["transient"]["display_id"] for _, _, content in cell.pictures}) == 1
    times = [when for when, _, _ in cell.pictures]
    assert all(after - before > 1.5 for before, after in pairwise(times[:-1]))
    last_step = max(place for place, message in enumerate(cell.messages) if "40/40" in str(message[2]))
    assert cell.messages.index(cell.pictures[0]) < last_step


def test_a_run_that_is_interrupted_before_its_first_step_leaves_nothing_behind(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    run = tmp_path / "runs" / "early"
    asked = client.execute("import finetune\nfinetune.train('recipe=tiny_lora', 'run_name=early')")
    wait_for("process", lambda: bool(processes_of(run)), SECONDS)
    manager.interrupt_kernel()
    cell = end_of(client, asked)
    assert cell.reply["ename"] == "RunFailed"
    assert "No checkpoint of it was saved." in cell.reply["evalue"]
    assert_all_gone(run)


def test_an_interrupted_evaluation_in_two_processes_is_a_keyboard_interrupt_as_in_one(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    rows = [{"prompt": f"What is {n} plus 5?", "completion": f"It is {n + 5}."} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = "'model=tiny', 'data.eval=rows.jsonl', 'launch.device=cpu', 'launch.num_processes=2'"
    here = f"import os, tempfile; tempfile.tempdir = os.environ['TMPDIR'] = {str(tmp_path)!r}"
    asked = client.execute(
        f"{here}\nimport finetune\nfinetune.evaluate(None, {words}, samples=300, max_new_tokens=900)"
    )
    answering = "finetune-evaluation-*/answers-base-*.jsonl"
    wait_for("answers", lambda: len(list(tmp_path.glob(answering))) == 2, SECONDS)
    manager.interrupt_kernel()
    assert end_of(client, asked).reply["ename"] == "KeyboardInterrupt"
    assert_all_gone(tmp_path)
    assert not list(tmp_path.glob("finetune-evaluation-*"))


def test_a_refusal_is_shown_without_a_traceback_and_a_plan_as_text_and_table(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    _, client = kernel
    cell = end_of(
        client, client.execute("import finetune\nfinetune.train('recipe=tiny_lora', 'adapter.r=0')")
    )
    (shown,) = (content for _, kind, content in cell.messages if kind == "error")
    assert "\n".join(shown["traceback"]).startswith(
        "Refusal: 1 problem in recipe 'tiny_lora':\n  adapter.r=0"
    )
    cell = end_of(client, client.execute("finetune.plan('recipe=qwen8b_full', 'hardware=8x_h100_80gb')"))
    (shown,) = (content["data"] for _, _, content in cell.messages if "data" in content)
    assert "strategy       fits  of a card" in shown["text/plain"]
    assert "<table" in shown["text/html"]
