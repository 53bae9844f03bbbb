"""A run that dies of something known says what it was: real faults, in real processes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.front_door import assert_all_gone, environment, finetune, started, wait_for_step

LONG = ["recipe=tiny_lora", "trainer.max_steps=100000", "launch.device=cpu", "launch.num_processes=2"]
TORCHRUN = ("torch.distributed.run", "--nproc_per_node=2", "--standalone")
LIMIT_BYTES = 20 * 2**30
"""Of addresses: far more than a small run takes."""
MEMORY = Path("/sys/fs/cgroup/memory")
GROUP_BYTES = 2_200_000_000
"""Of memory: what a small run is planned to take at most, and little more."""

EATS = "self.held = getattr(self, 'held', []) + [torch.ones(100_000_000) for _ in range(100)]"
TRUNCATES = (
    "file = open(os.environ['FAULT_FILE'], 'w+b'); file.truncate(2**20); "
    "view = mmap.mmap(file.fileno(), 2**20); file.truncate(0); view[2**19]"
)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
UNKNOWN = "raise ValueError('a fault of this program alone')"


def faulty(at: Path, fault: str) -> str:
    """A PYTHONPATH under which rank 1 does this behind its second step."""
    (at / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import mmap, signal, torch\n"
        "    from finetune.training.callbacks import Counters\n"
        "    def broken(self, args, state, control, **kwargs):\n"
        "        if state.global_step == 2:\n"
        f"            {fault}\n"
        "        self.trainer.count_step()\n"
        "    Counters.on_step_end = broken\n",
        encoding="utf-8",
    )
    return os.pathsep.join([str(at), environment()["PYTHONPATH"]])


def above(err: str) -> str:
    """The diagnosis as one line; it stands above the failure itself."""
    assert err.index("diagnosis ") < err.index("failed first")
    return " ".join(err[err.index("diagnosis ") : err.index("failed first")].split())


@pytest.mark.soak
def test_a_rank_that_gets_no_memory_is_told_with_its_limit_and_what_takes_less(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path, PYTHONPATH=faulty(tmp_path, EATS)) as (process, run):
        resource.prlimit(process.pid, resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1, err
        told = above(err)
        assert "diagnosis rank 1 ran out of the host's memory (RAM) 0.40 GB more were asked for;" in told
        assert "a process may have 21.5 GB of addresses (ulimit -v); planned:" in told
        assert "to do ulimit -v unlimited" in told
        assert "trainer.per_device_train_batch_size=1 trainer.global_batch_size=16 (now 2;" in told
        assert err.rstrip().endswith("(Cannot allocate memory)")
        assert run.report["status"] == "failed"
        found = run.report["diagnosis"]
        assert (found["cause"], found["rank"]) == ("host_memory", 1)
        assert found["advice"][0].startswith("ulimit -v unlimited")
        assert_all_gone(run.path)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that allows its processes little memory."""
    group = MEMORY / f"finetune-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES), encoding="ascii")
    except OSError as error:
        pytest.skip(f"no control group for memory (version 1) can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.soak
def test_a_rank_that_the_kernel_killed_for_memory_is_told_by_the_kernels_own_count(
    tmp_path: Path, small_group: Path
) -> None:
    with started(*LONG, at=tmp_path, PYTHONPATH=faulty(tmp_path, EATS)) as (process, run):
        (small_group / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1, err
        told = above(err)
        assert "diagnosis rank 1 was killed by SIGKILL the kernel killed a process of this container" in told
        assert "for lack of memory (oom_kill: 0 -> 1)" in told
        assert "find out who" not in told
        assert run.report["diagnosis"]["cause"] == "killed"
        assert_all_gone(run.path)


def test_a_rank_that_somebody_killed_is_not_said_to_have_had_too_little_memory(tmp_path: Path) -> None:
    outcome = finetune(*LONG, at=tmp_path, PYTHONPATH=faulty(tmp_path, KILLED))
    assert outcome.code == 1
    told = above(outcome.err)
    assert "diagnosis rank 1 was killed by SIGKILL" in told
    if "oom_kill " in Path("/proc/vmstat").read_text(encoding="ascii"):
        assert "the kernel counts no kill for lack of memory since the run began" in told
        assert "to do find out who ends processes here" in told
    else:
        assert "if nobody did that, the kernel did because memory was short: see dmesg" in told
    assert (outcome.report["diagnosis"]["cause"], outcome.report["diagnosis"]["rank"]) == ("killed", 1)


@pytest.mark.soak
def test_a_launcher_that_was_killed_is_told_once_and_its_workers_save_before_they_end(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path) as (process, run):
        wait_for_step(run.path, 2)
        launchers = psutil.Process(process.pid).children()
        next(one for one in launchers if "accelerate.commands.launch" in one.cmdline()).kill()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        assert "diagnosis the launcher was killed by SIGKILL" in " ".join(err.split())
        assert err.rstrip().endswith("which starts and watches the ranks, was ended by SIGKILL.")
        assert "Traceback" not in out + err
        assert len(list((run.path / "checkpoints").glob("checkpoint-*"))) == 1
        assert run.report["status"] == "failed"
        assert run.report["diagnosis"]["cause"] == "killed"
        assert_all_gone(run.path)


@pytest.mark.soak
def test_a_bus_error_is_told_with_what_shared_memory_there_is(tmp_path: Path) -> None:
    fault = faulty(tmp_path, TRUNCATES)
    outcome = finetune(*LONG, at=tmp_path, PYTHONPATH=fault, FAULT_FILE=str(tmp_path / "mapped"))
    assert outcome.code == 1
    told = above(outcome.err)
    assert "diagnosis rank 1: bus error" in told
    assert re.search(r"/dev/shm has [\d,.]+ MB, [\d,.]+ free now; trainer.dataloader_num_workers=0", told)
    assert "nothing of this run needs /dev/shm" in told
    assert "ended by SIGBUS" in outcome.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_named_whichever_it_is(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=16k tmpfs /dev/shm && exec "$@"'
    words = [*LONG, "trainer.dataloader_num_workers=2", "run_name=run", f"output_dir={tmp_path / 'runs'}"]
    err = privately(small, words, tmp_path)
    # whichever rank asks first
    assert re.search(
        r"diagnosis rank [01]: a disk is full full: /dev/shm \(shared memory\): 0\.0", above(err)
    )
    assert "to do trainer.dataloader_num_workers=0 (now 2)" in above(err)
    cache = tmp_path / "cache"
    cache.mkdir()
    small = f'mount -t tmpfs -o size=8k tmpfs {cache} && FINETUNE_CACHE={cache} exec "$@"'
    err = privately(small, [*LONG, "run_name=other", f"output_dir={tmp_path / 'runs'}"], tmp_path)
    assert f"full: {cache} (prepared data): 0.0" in " ".join(err.split())
    assert "prepared rows cannot be written" in err


def privately(mounts: str, words: list[str], at: Path) -> str:
    """What a run says, its output in one, that alone sees these mounts."""
    command = ["unshare", "--mount", "bash", "-c", mounts, "bash", sys.executable, "-m", "finetune", *words]
    done = subprocess.run(
        command, cwd=at, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr}")
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return done.stdout[done.stdout.find("diagnosis ") :] * ("diagnosis " in done.stdout) + done.stderr


@pytest.mark.soak
def test_under_another_launcher_a_rank_is_missed_by_the_one_that_can_still_speak(tmp_path: Path) -> None:
    outcome = finetune(*LONG, at=tmp_path, launcher=TORCHRUN, PYTHONPATH=faulty(tmp_path, KILLED))
    assert outcome.code != 0
    said = " ".join((outcome.out + outcome.err).split())
    assert "diagnosis rank 0 lost the connection to another process" in said
    assert "rank 1 has left no word of why it ended; its log ends:" in said
    assert outcome.report["diagnosis"]["cause"] == "lost_process"


@pytest.mark.soak
def test_an_unknown_failure_is_told_as_it_is_and_not_guessed_at(tmp_path: Path) -> None:
    outcome = finetune(*LONG, at=tmp_path, launcher=TORCHRUN, PYTHONPATH=faulty(tmp_path, UNKNOWN))
    assert outcome.code != 0
    assert "diagnosis " not in outcome.out + outcome.err
    assert outcome.err.count("ValueError: a fault of this program alone") == 1
    assert outcome.report.get("diagnosis") is None
