"""Every notebook runs from top to bottom, in a kernel that has touched neither torch nor a device before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.front_door import REPOSITORY, environment, finetune

NOTEBOOKS = REPOSITORY / "notebooks"
SHOWN = {
    "quickstart": [
        "16/16",
        "image/png",
        "completed (lora, single, 1 process, fp32)",
        "8 of 8 checks passed",
        "Arr!",
        "tuned - base",
        "Did you mean trainer.learning_rate",
        "adapter.r=0",
    ],
    "choosing_a_strategy": ["<td>fsdp_offload</td>", "zero2 was asked for", "adapter=qlora"],
    "looking_at_data": [
        "<mark>7 plus 5 is 12.&lt;|im_end|&gt;</mark>",
        "<mark>Thursday comes before Friday.&lt;|im_end|&gt;</mark>",
        "line 17",
        "is 'bot'",
    ],
    "comparing_runs": ["10/10", "adapter.method", "image/png", "loss on held-out rows"],
    "to_eight_gpus": [
        "'actual': 'fsdp'",
        "'actual': 2",
        "distributed_type: FSDP",
        "64 = 2 per device x 8 processes x 4",
    ],
}
"""What stands in the outputs of each."""


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_and_shows_what_it_speaks_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "strip the outputs (nbstripout)"
    assert all(cell.get("execution_count") is None for cell in notebook.cells), "strip the counts"
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "\n".join(map(_text, outputs))
    assert [words for words in SHOWN[name] if words not in shown] == []
    ours = [cell for cell in notebook.cells if "from peft import" not in cell.source]  # libraries draw bars
    printed = [output for cell in ours for output in cell.get("outputs", [])]
    assert [_text(output) for output in printed if output.get("name") == "stderr"] == []
    assert "RANK" not in os.environ
    if name == "comparing_runs":
        _has_the_numbers_of_the_report(notebook, tmp_path)


def _text(output: Any) -> str:
    """What was printed, or all of a display; of a picture its kind alone."""
    if "data" not in output:
        return str(output.get("text"))
    return "\n".join(
        f"{kind} {content if kind.startswith('text/') else ''}" for kind, content in output["data"].items()
    )


def _has_the_numbers_of_the_report(notebook: Any, at: Path) -> None:
    """The cell that shows the runs side by side, against `finetune report` and `metrics.jsonl`."""
    said = finetune("report", "runs/lora", "runs/full", "--json", at=at)
    assert said.code == 0, said.err
    (cell,) = (cell for cell in notebook.cells if cell.source.endswith("\ncomparison"))
    table = cell.outputs[-1]["data"]["text/html"]
    for run in json.loads(said.out)["runs"]:
        lines = (at / "runs" / run["name"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]
        assert run["results"]["final_loss"] == losses[-1]
        assert f"{losses[-1]:.4f}" in table
