"""Which folders outlive a stop: it is the file system that they lie on."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.hardware import mounts
from finetune.hardware.mounts import mount_of
from finetune.hardware.provider import PROVIDERS, outlives_stop


@pytest.mark.parametrize(
    ("name", "mount", "kept"),
    [
        ("RunPod", "/workspace", True),
        ("RunPod", "/", False),  # also /workspace, where no volume is mounted at it
        ("RunPod", "/data", None),
        ("Lambda", "/lambda/nfs/mine", True),
        ("Vast.ai", "/", True),
        ("Google Colab", "/content/drive", True),
        ("Kaggle", "/kaggle/working", None),
        ("SageMaker training job", "/opt/ml/checkpoints", None),
        ("SageMaker training job", "/opt/ml", None),
        ("Modal", "/", False),
        ("Microsoft Azure", "/mnt", False),
        ("Microsoft Azure", "/mnt/resource", False),
        ("Microsoft Azure", "/mnt/data", None),  # a data disk
        ("Microsoft Azure", "/", None),
    ],
)
def test_the_file_system_of_a_folder_decides(name: str, mount: str, kept: bool | None) -> None:
    provider = next(one for one in PROVIDERS if one.name == name)
    assert outlives_stop(provider, Path(mount)) is kept


def test_the_deepest_mount_counts_and_of_two_there_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mounts"
    table.write_text("".join(f"x {line} rw 0 0\n" for line in MOUNTED))
    monkeypatch.setattr(mounts, "MOUNTS", table)
    assert mount_of(Path("/a/b/c")) == (Path("/a"), "nfs4")
    assert mount_of(Path("/with blank/x")) == (Path("/with blank"), "xfs")
    assert mount_of(Path("/ab")) == (Path("/"), "overlay")


MOUNTED = ("/a ext4", "/ overlay", "/a nfs4", "/a/b/d tmpfs", "/with\\040blank xfs")
