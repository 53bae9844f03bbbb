"""Starting, watching and ending processes, by every way in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from finetune.distributed.launch import WORKER
from tests.front_door import (
    Outcome,
    assert_all_gone,
    environment,
    finetune,
    processes_of,
    relative_difference,
    started,
    wait_for,
    wait_for_step,
)

QUICK = ["recipe=tiny_lora", "trainer.max_steps=3", "launch.device=cpu"]
LONG = ["recipe=tiny_lora", "trainer.max_steps=100000", "launch.device=cpu", "launch.num_processes=2"]
ACCELERATE = "accelerate.commands.launch"
TORCHRUN = ("torch.distributed.run", "--nproc_per_node=2", "--standalone")


def test_other_launchers_give_the_run_that_ours_gives(tmp_path: Path) -> None:
    words = [*QUICK, "distributed=ddp"]
    ours = finetune(*words, "launch.num_processes=2", at=tmp_path, name="ours")
    assert ours.code == 0, ours.out + ours.err
    launch = (ACCELERATE, "--config_file", str(ours.path / "accelerate.yaml"), "--main_process_port", "0")
    accelerate = finetune(*words, at=tmp_path, name="accelerate", launcher=launch)
    torchrun = finetune(*words, at=tmp_path, name="torchrun", launcher=TORCHRUN)
    for other in (accelerate, torchrun):
        assert other.code == 0, other.out + other.err
        assert other.report["num_processes"] == {"requested": 2, "actual": 2}
        assert other.report["wrapped_by"] == "DistributedDataParallel"
        assert relative_difference(other.losses, ours.losses) <= 1e-5
        assert all(check["passed"] for check in other.report["verified"])
        assert (other.path / "logs" / "rank-1.log").exists()


def test_an_accelerate_fsdp_file_without_a_version_runs_as_fsdp2_and_one_for_version_1_is_refused(
    tmp_path: Path,
) -> None:
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
        "main_process_port": 0,
    }
    file = tmp_path / "guide.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    outcome = finetune(*QUICK, at=tmp_path, launcher=(ACCELERATE, "--config_file", str(file)))
    assert outcome.code == 0, outcome.out + outcome.err
    assert "FSDP2 is used" in outcome.out
    assert outcome.report["strategy"]["actual"] == "fsdp"
    assert outcome.report["wrapped_by"].startswith("FSDP")
    content["fsdp_config"]["fsdp_version"] = 1
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    refused = finetune(*QUICK, at=tmp_path, name="refused", launcher=(ACCELERATE, "--config_file", str(file)))
    assert refused.code != 0
    assert f"accelerate to-fsdp2 --config_file {file}" in refused.out + refused.err
    assert not refused.path.exists()


def test_what_a_launcher_started_and_what_the_config_asks_must_agree(tmp_path: Path) -> None:
    # accelerate starts ONE process here, although two were asked of it, and says nothing
    launcher = (ACCELERATE, "--cpu", "--num_processes", "2")
    outcome = finetune(*QUICK, "launch.num_processes=2", at=tmp_path, launcher=launcher)
    assert outcome.code != 0
    assert "launch.num_processes=2" in outcome.err
    assert "started 1" in outcome.err
    strategies = finetune(
        *QUICK, "distributed=zero2", at=tmp_path, launcher=TORCHRUN, ACCELERATE_USE_FSDP="true"
    )
    assert strategies.code != 0
    assert "distributed=zero2" in strategies.err
    assert "fsdp" in strategies.err
    assert not outcome.path.exists()
    dry = finetune(*QUICK, "--dry-run", at=tmp_path, launcher=TORCHRUN)
    assert dry.code != 0
    assert "--dry-run and --json are answered by one process" in dry.err


def test_the_environment_of_the_shell_does_not_change_the_run(tmp_path: Path) -> None:
    home = tmp_path / "hf" / "accelerate"
    home.mkdir(parents=True)
    default = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "fp16",
        "num_processes": 4,
        "compute_environment": "LOCAL_MACHINE",
    }
    (home / "default_config.yaml").write_text(yaml.safe_dump(default), encoding="utf-8")
    outcome = finetune(*QUICK, at=tmp_path, HF_HOME=str(tmp_path / "hf"))
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.report["strategy"] == {"requested": "single", "actual": "single"}
    assert outcome.report["precision"] == "fp32"
    refused = finetune(*QUICK, at=tmp_path, name="refused", ACCELERATE_MIXED_PRECISION="fp16")
    assert refused.code == 2
    assert "fp16" in refused.err
    assert "fp32" in refused.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)]
)
def test_a_signal_saves_a_checkpoint_and_leaves_no_process(number: int, code: int, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with started(*LONG, at=tmp_path, TMPDIR=str(scratch)) as (process, run):
        wait_for_step(run.path, 2)
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        told = f"train was interrupted by {signal.Signals(number).name}: what the run has written stays"
        assert told in err
        assert_all_gone(run.path)
        assert not list(scratch.glob("torchelastic_*"))
        assert not list((run.path / "logs").glob(".*"))
        assert run.report["status"] == "interrupted"
        checkpoints = list((run.path / "checkpoints").glob("checkpoint-*"))
        assert len(checkpoints) == 1
        assert (checkpoints[0] / "trainer_state.json").exists()
        assert not (run.path / "model").exists()


@pytest.mark.parametrize(("long", "name"), [("model.fetch", "fetch_model"), ("data.prepare", "prepare_data")])
def test_a_signal_ends_what_comes_before_the_training_too(long: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        "if 'finetune' in sys.orig_argv:\n"
        f"    import time, finetune.{long} as module\n"
        "    wait = lambda *given, **more: (pathlib.Path('begun').touch(), time.sleep(300))\n"
        f"    module.{name} = wait\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    hook = f"hooks.on_failure=echo $FINETUNE_EXIT_CODE > {tmp_path / 'told'}"
    with started(*LONG, hook, "--json", at=tmp_path, PYTHONPATH=path) as (process, run):
        wait_for("beginning", (tmp_path / "begun").exists, seconds=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=40)
        assert process.returncode == 130
        told = "train was interrupted by SIGINT: what the run has written stays in its folder"
        assert json.loads(out)["exit_code"] == 130
        assert json.loads(out)["error"].startswith(told)
        assert told in err
        assert_all_gone(run.path)
        assert (run.report["status"], run.report["error"]) == ("interrupted", "stopped before the first step")
        assert (tmp_path / "told").read_text() == "130\n"


def test_a_signal_while_the_workers_start_ends_the_run(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path) as (process, run):
        deadline = time.monotonic() + 60
        while not (run.path / "data.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
        assert_all_gone(run.path)
        assert run.report["status"] == "interrupted"
        assert not (run.path / "model").exists()


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path) as (process, run):
        wait_for_step(run.path, 1)
        for worker in processes_of(run.path):
            if "finetune.training.worker" in worker.cmdline() and "accelerate" not in " ".join(
                worker.cmdline()
            ):
                worker.suspend()  # a rank that hangs: the first signal cannot be answered
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 143
        assert_all_gone(run.path)


def rank_1_fails(tmp_path: Path, step: int) -> str:
    """A PYTHONPATH under which rank 1 alone raises behind a step."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from finetune.training.callbacks import Counters\n"
        "    def broken(self, args, state, control, **kwargs):\n"
        f"        if state.global_step == {step}:\n"
        "            raise ValueError('a fault of rank 1 alone')\n"
        "        self.trainer.count_step()\n"
        "    Counters.on_step_end = broken\n",
        encoding="utf-8",
    )
    return os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])


def test_the_first_rank_to_fail_is_named_and_its_traceback_comes_last(tmp_path: Path) -> None:
    path = rank_1_fails(tmp_path, step=2)
    with started(*LONG, at=tmp_path, PYTHONPATH=path) as (process, run):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert_all_gone(run.path)
        assert "rank 1 failed first" in err
        assert err.rstrip().endswith("ValueError: a fault of rank 1 alone")
        assert err.count("ValueError: a fault of rank 1 alone") == 1
        assert run.report["status"] == "failed"
        assert not (run.path / "model").exists()


def test_under_another_launcher_a_failing_rank_calls_the_hook_and_the_folder_is_held(tmp_path: Path) -> None:
    path = rank_1_fails(tmp_path, step=40)
    told = f"hooks.on_failure=echo $FINETUNE_STATUS >> {tmp_path}/told.txt"
    torchrun = [sys.executable, "-m", *TORCHRUN, "-m", "finetune", *LONG[:-1], told, "run_name=run"]
    process = subprocess.Popen(
        [*torchrun, f"output_dir={tmp_path / 'runs'}", "checkpoint.every_steps=1"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = tmp_path / "runs" / "run"
    wait_for_step(run, 2)
    held = finetune(*LONG, "checkpoint.resume=auto", at=tmp_path)
    assert held.code == 2
    assert "another process is at work in it" in held.err
    assert process.wait(timeout=120) == 1
    assert (tmp_path / "told.txt").read_text() == "failed\n"
    assert_all_gone(run)


def test_an_fsdp_run_that_would_be_plain_ddp_is_refused_on_every_rank(tmp_path: Path) -> None:
    # what accelerate does by itself with an FSDP config on CPU processes: DDP, without a word
    (tmp_path / "sitecustomize.py").write_text(
        "import contextlib, sys\n"
        "if any('finetune.training.worker' in word for word in sys.orig_argv):\n"
        "    import finetune.training.process as process\n"
        "    process.cpu_stand_in = contextlib.nullcontext\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    words = [*QUICK, "distributed=fsdp", "launch.num_processes=2"]
    outcome = finetune(*words, at=tmp_path, PYTHONPATH=path)
    assert outcome.code == 2, outcome.out + outcome.err
    assert "rank 1: strategy=ddp: fsdp was asked for." in outcome.err
    assert "nothing was trained" in outcome.err
    assert not (outcome.path / "metrics.jsonl").exists()


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path) as (process, run):
        wait_for_step(run.path, 1)
        workers = [p for p in processes_of(run.path) if p.environ().get("RANK") == "1"]
        workers[0].kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert_all_gone(run.path)
        assert run.report["status"] == "failed"
        assert "rank 1 failed first" in err
        assert "The process was ended by SIGKILL" in err


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path) as (process, run):
        wait_for_step(run.path, 1)
        process.kill()
        process.wait()
        assert_all_gone(run.path)


def test_two_runs_at_once_both_finish_and_a_taken_port_is_refused(tmp_path: Path) -> None:
    words = [*QUICK, "distributed=ddp", "launch.num_processes=2", f"output_dir={tmp_path / 'runs'}"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "finetune", *words, f"run_name={name}"], cwd=tmp_path, env=environment()
        )
        for name in ("a", "b")
    ]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = finetune(*words[:-1], f"launch.main_process_port={port}", at=tmp_path, name="refused")
    assert refused.code == 2
    assert str(port) in refused.err


def test_a_detached_run_outlives_the_command(tmp_path: Path) -> None:
    outcome = finetune(*QUICK, "launch.detach=true", at=tmp_path)
    assert outcome.code == 0, outcome.err
    assert str(outcome.path / "logs" / "rank-0.log") in outcome.out
    deadline = time.monotonic() + 90
    while not (outcome.path / "report.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    while outcome.report["status"] != "completed" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert outcome.report["status"] == "completed"
    assert_all_gone(outcome.path)


def test_two_machines_share_one_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        *QUICK,
        "distributed=ddp",
        "launch.num_machines=2",
        "launch.num_processes=2",
        "launch.main_process_ip=127.0.0.1",
        f"launch.main_process_port={port}",
        "run_name=run",
        f"output_dir={tmp_path / 'runs'}",
    ]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "finetune", *words, f"launch.machine_rank={rank}"],
            cwd=tmp_path,
            env=environment(),
        )
        for rank in (0, 1)
    ]
    # a worker of this run that somebody else has started: the other machine's, here on the same one
    foreign = [sys.executable, "-c", "import time; time.sleep(600)", WORKER, str(tmp_path / "runs" / "run")]
    with subprocess.Popen(foreign) as other:
        try:
            assert [machine.wait(timeout=200) for machine in machines] == [0, 0]
            assert other.poll() is None, "one machine's end has ended the other's processes"
        finally:
            other.kill()
    report = Outcome(0, "", "", tmp_path / "runs" / "run").report
    assert report["num_processes"] == {"requested": 2, "actual": 2}
    assert report["status"] == "completed"


def test_every_process_gets_its_share_of_the_cores(tmp_path: Path) -> None:
    with started(*LONG, at=tmp_path, OMP_NUM_THREADS="") as (_, run):
        wait_for_step(run.path, 1)
        workers = [p for p in processes_of(run.path) if p.environ().get("RANK") in ("0", "1")]
        expected = str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert {worker.environ()["OMP_NUM_THREADS"] for worker in workers} == {expected}
