"""A rehearsal plays a whole run with a twin of its model, and finds a fault where it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import REPOSITORY, environment, processes_of, wait_for

NAMES = ["check", "twin", "prepare", "train", "checkpoint", "kill", "resume", "save", "merge", "reopen"]
NAMES += ["generate"]

FAULTS = {
    "a strategy's file that means another one": (
        ("conf/distributed/zero3_offload.yaml", "strategy: zero3_offload", "strategy: zero3"),
        ("recipe=qwen8b_lora", "distributed=zero3_offload"),
        ("check", "means strategy zero3"),
    ),
    "a strategy that offloads nothing": (
        ("finetune/distributed/accelerate.py", 'if "optimizer" in traits.offloads:', "if False:"),
        ("recipe=qwen8b_full", "distributed=zero2_offload"),
        ("train", "strategy=zero2: zero2_offload was asked for"),
    ),
    "a save that writes one rank only": (
        ("finetune/training/saving.py", "enumerate(copies):", "enumerate(copies if self.rank == 0 else ()):"),
        ("recipe=qwen8b_full", "distributed=fsdp"),
        ("checkpoint", "the state of rank 1"),
    ),
    "a resume that skips the optimizer": (
        (
            "finetune/training/state_files.py",
            "    _fill(live, saved)\n    _set",
            "    _fill(live, saved, (WEIGHT,))\n    _set",
        ),
        ("recipe=qwen8b_lora", "distributed=ddp"),
        ("resume", "after the resume"),
    ),
    "a model of which one rank's part is saved": (
        ("finetune/model/export.py", "whole.full_tensor()", "whole.to_local()"),
        ("recipe=qwen8b_full", "distributed=fsdp"),
        ("save", ""),
    ),
}
"""What is broken: (file, text, instead), the run, and the stage that has to notice with its words."""


def rehearsed(*words: str, code: Path = REPOSITORY, at: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and stages by name; nothing is left in the temporary folder."""
    places = {"PYTHONPATH": str(code), "TMPDIR": str(at), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "finetune", "rehearse", *words, "--json"]
    done = subprocess.run(
        command, cwd=at, env={**environment(), **places}, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert done.stderr.count("\n") >= len(told["stages"])  # each is told as it ends
    assert told["ok"] is (done.returncode == 0)
    assert list(at.glob("finetune-rehearsal-*")) == []
    return done.returncode, {stage["name"]: stage for stage in told["stages"]}


def broken(fault: str, at: Path) -> Path:
    """A copy of the package with one fault in it."""
    file, text, instead = FAULTS[fault][0]
    code = at / "code"
    for name in ("finetune", "conf", "recipes"):
        shutil.copytree(REPOSITORY / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    whole = (code / file).read_text(encoding="utf-8")
    assert whole.count(text) == 1
    (code / file).write_text(whole.replace(text, instead), encoding="utf-8")
    return code


def assert_noticed(fault: str, at: Path) -> None:
    _, words, (stage, told) = FAULTS[fault]
    code, stages = rehearsed(*words, code=broken(fault, at), at=at)
    assert code == 3
    assert [name for name, one in stages.items() if one["status"] == "fail"] == [stage], stages
    assert told in stages[stage]["detail"]
    behind = NAMES[NAMES.index(stage) + 1 :]
    assert all(stages[name]["status"] == "skip" for name in behind)


@pytest.mark.slow
def test_a_model_of_8b_is_rehearsed_under_zero3_without_network(tmp_path: Path) -> None:
    code, stages = rehearsed("recipe=qwen8b_full", "distributed=zero3", at=tmp_path)
    assert code == 0, stages
    assert list(stages) == NAMES
    assert "Qwen3ForCausalLM" in stages["twin"]["detail"]
    assert "zero3 on 2 processes" in stages["train"]["detail"]
    assert sum(stage["seconds"] for stage in stages.values()) < 180


def test_a_fault_fails_its_stage(tmp_path: Path) -> None:
    """The others that are planted take longer: `make soak` has them all."""
    assert_noticed("a strategy's file that means another one", tmp_path)


def test_a_run_that_would_be_refused_fails_at_once(tmp_path: Path) -> None:
    code, stages = rehearsed("recipe=qwen8b_full", "hardware=1x_rtx4090", at=tmp_path)
    assert code == 3
    assert "does not fit on 1x rtx4090" in stages["check"]["detail"]
    assert {stage["status"] for name, stage in stages.items() if name != "check"} == {"skip"}


@pytest.mark.parametrize("verb", ["doctor", "rehearse", "scale"])
def test_verbs_that_start_processes_refuse_another_launcher(verb: str, tmp_path: Path) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "finetune", verb, "recipe=tiny_lora"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(**world), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torchrun started this one" in done.stderr


def test_an_interrupted_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    places = {"TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "finetune", "rehearse", "recipe=tiny_lora", "launch.num_processes=2"]
    process = subprocess.Popen(
        [*command, "distributed=ddp", "--json"],
        env=environment(**places),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(
            "a worker", lambda: any("worker" in " ".join(one.cmdline()) for one in processes_of(tmp_path))
        )
        os.kill(process.pid, signal.SIGHUP)  # the terminal was closed
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 129
    assert json.loads(out)["exit_code"] == 129
    wait_for("the end of all", lambda: processes_of(tmp_path) == [], seconds=15)
    assert [left.name for left in tmp_path.iterdir() if not left.name.startswith("torchinductor")] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe=tiny_lora", "trainer.lerning_rate=1"], "Did you mean trainer.learning_rate?"),
        (["tiny_lora"], "Did you mean recipe=tiny_lora?"),
        (["--all", "trainer.max_steps=3"], "choose from model, adapter, distributed"),
        (["--all", "distributed=zero9"], "of: single, ddp,"),
    ],
)
def test_wrong_words_are_told_before_anything_starts(words: list[str], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "finetune", "rehearse", *words]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
