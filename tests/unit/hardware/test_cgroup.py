"""What control groups allow, in both versions, seen from outside a container and inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.hardware import cgroup, cores, memory

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of groups, and a machine with 64 GiB of which 60 are free."""
    told = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {60 * 2**20} kB\n"
    (tmp_path / "meminfo").write_text(told, encoding="utf-8")
    monkeypatch.setattr(memory, "HOST", tmp_path / "meminfo")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: range(128))
    return tmp_path


def write(groups: Path, own: str, **files: str) -> None:
    (groups / "own").write_text(own, encoding="utf-8")
    for name, text in files.items():
        file = groups / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def test_without_groups_the_machine_itself_counts(groups: Path) -> None:
    assert (memory.total_bytes(), memory.free_bytes()) == (64 * GIB, 60 * GIB)
    assert cores.usable_cores() == 128
    assert cgroup.oom_kills() is None


def test_the_cache_of_files_is_free_memory(groups: Path) -> None:
    """After a download a container's own count is full of files that the kernel drops at need."""
    write(
        groups,
        "0::/\n",
        memory_dot_max=str(32 * GIB),
        memory_dot_current=str(31 * GIB),
        memory_dot_stat=f"anon 1\ninactive_file {28 * GIB}\n",
    )
    assert (memory.total_bytes(), memory.free_bytes()) == (32 * GIB, 29 * GIB)


def test_a_limit_of_a_group_above_counts(groups: Path) -> None:
    """As a scheduler or systemd sets it: the process sees the whole tree, and its own group has no limit."""
    above = {"slurm__job7__memory_dot_max": str(16 * GIB), "slurm__job7__memory_dot_current": str(GIB)}
    own = {"slurm__job7__step__memory_dot_max": "max", "slurm__job7__step__memory_dot_current": str(GIB)}
    write(groups, "0::/slurm/job7/step\n", **above, **own, slurm__job7__cpu_dot_max="400000 100000")
    assert (memory.total_bytes(), memory.free_bytes()) == (16 * GIB, 15 * GIB)
    assert (cores.usable_cores(), cores.whole_cores()) == (4, 4)


def test_the_first_version_is_read_inside_a_container(groups: Path) -> None:
    """Its path is the host's, and what is mounted is the group itself."""
    write(
        groups,
        "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
        memory__memory_dot_limit_in_bytes=str(8 * GIB),
        memory__memory_dot_usage_in_bytes=str(6 * GIB),
        memory__memory_dot_stat=f"total_inactive_file {4 * GIB}\n",
        memory__memory_dot_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        cpu__cpu_dot_cfs_quota_us="50000",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    assert (memory.total_bytes(), memory.free_bytes()) == (8 * GIB, 6 * GIB)
    assert (cores.usable_cores(), cores.whole_cores()) == (0.5, 1)
    assert cgroup.oom_kills() == 3


def test_no_limit_is_none(groups: Path) -> None:
    write(
        groups,
        "0::/\n1:cpu:/\n",
        memory_dot_max="max",
        memory_dot_current=str(GIB),
        cpu_dot_max="max 100000",
        cpu__cpu_dot_cfs_quota_us="-1",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    assert memory.total_bytes() == 64 * GIB
    assert cores.usable_cores() == 128
