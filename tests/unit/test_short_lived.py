"""A temporary folder goes with its process, or with the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from finetune.short_lived import short_lived
from tests.front_door import environment

HOLDER = (
    "import sys\n"
    "from finetune.short_lived import short_lived\n"
    "with short_lived('some-') as folder:\n"
    "    print(folder, flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_a_folder_that_a_killed_process_left_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "some-of-somebody"  # without a lock nothing proves that it was left
    foreign.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=environment(TMPDIR=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    with short_lived("some-") as own:
        assert own.parent == held.parent == tmp_path
        assert held.is_dir()
    holder.kill()
    holder.communicate()
    assert held.is_dir()
    with short_lived("some-") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, foreign])
    assert list(tmp_path.iterdir()) == [foreign]
