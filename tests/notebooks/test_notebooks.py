"""Every notebook runs from top to bottom, in a kernel that has touched neither torch nor a device before."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.front_door import REPOSITORY, environment

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "strip the outputs (nbstripout)"
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = str([cell.get("outputs") for cell in notebook.cells])
    assert "step 40/40" in shown
    assert "image/png" in shown
    assert "'actual': 'fsdp'" in shown
    assert "Did you mean trainer.learning_rate" in shown
    assert "adapter.r=0" in shown
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert "RANK" not in os.environ
