"""Links are judged by what a run sends over them, and by how long it computes meanwhile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.doctor.run import link_check, run_checks
from finetune.hardware.survey import MachineReport, probe_machine
from finetune.planner.answer import answer
from finetune.planner.plan import Plan
from finetune.training.planned import settled
from finetune.training.start import CheckedRun, check_run

MACHINES = Path(__file__).resolve().parents[2] / "machines"


def report(machine: str, at: Path, monkeypatch: pytest.MonkeyPatch) -> MachineReport:
    """What is known of a machine whose nvidia-smi is written after the documented format."""
    program = at / "nvidia-smi"
    cases = '"-q -x") cat smi.xml ;; "topo -m") cat topo.txt ;; "topo -p2p") cat p2p.txt ;;'
    program.write_text(f"#!/bin/sh\ncd '{MACHINES / machine}'\ncase \"$1 $2\" in {cases} esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{at}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return probe_machine(at, measure_disk=False)


def planned(*words: str) -> CheckedRun:
    """A run on cards that are not here."""
    (found,) = answer([*words, "plan.enforce=false"])
    config, facts = settled(found.config, found.plan)
    return CheckedRun(config, facts, found.composed, found.plan)


def judged(run: CheckedRun, machine: MachineReport) -> Check:
    check = link_check(run, machine)
    assert check is not None
    assert check.name == "links"
    return check


def test_a_slow_link_bears_what_hides_behind_computing_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = report("4x_rtx4090", tmp_path, monkeypatch)
    few = ("hardware=4x_rtx4090", "trainer.global_batch_size=8")
    adapter = judged(planned("recipe=qwen8b_lora", "distributed=ddp", *few), slow)
    full = judged(planned("recipe=qwen8b_full", "distributed=ddp", *few), slow)
    rarely = judged(planned("recipe=qwen8b_full", "distributed=ddp", few[0]), slow)  # 8 micro batches a step
    sharded = judged(planned("recipe=qwen8b_full", "distributed=zero3", few[0]), slow)
    assert [one.status for one in (adapter, full, rarely, sharded)] == [PASS, WARN, PASS, WARN]
    assert "for ddp: the slowest way is PHB" in full.detail
    assert (
        "by the plan each card sends 49.1 GB a step, 4.2 s at best, beside 3.1 s of computing" in full.detail
    )
    assert "GPU0" in full.detail
    assert "adapter=lora" in full.fix


def test_nvlink_bears_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = report("8x_h100_sxm", tmp_path, monkeypatch)
    check = judged(planned("recipe=qwen8b_full", "distributed=fsdp", "hardware=8x_h100_80gb"), fast)
    assert check.status == PASS, check


def test_without_a_plan_the_method_and_the_strategy_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = report("4x_a100_pcie", tmp_path, monkeypatch)
    words = "hardware=4x_a100_80gb_pcie"
    full = replace(planned("recipe=qwen8b_full", "distributed=ddp", words), plan="no sizes")
    adapter = replace(planned("recipe=qwen8b_lora", "distributed=ddp", words), plan="no sizes")
    sharded = replace(planned("recipe=qwen8b_lora", "distributed=fsdp", words), plan="no sizes")
    assert [judged(run, slow).status for run in (full, adapter, sharded)] == [WARN, PASS, WARN]


@pytest.mark.parametrize(
    ("free_mb", "way"), [(0, "larger disk."), (3, "checkpoint.keep=1."), (6, "checkpoint.keep=2.")]
)
def test_to_keep_fewer_is_advised_where_that_is_enough(free_mb: int, way: str, tmp_path: Path) -> None:
    run, there = check_run(["recipe=tiny_lora", "checkpoint.keep=3"]), probe_machine(tmp_path)
    assert isinstance(run.plan, Plan)
    size = run.plan.chosen.outside.checkpoint
    free = int(free_mb / 3 * size + size)  # beside what is kept one is being written
    disk = replace(there.host.disk, free_bytes=free if free_mb else 0, write_bytes_s=None)
    checks = run_checks(run, replace(there, host=replace(there.host, disk=disk)))
    told = {check.name: check for check in checks}
    assert (told["room"].status, told["room"].fix.endswith(way)) == (FAIL, True), told["room"]
    assert told["save time"].status == WARN  # nothing was measured


def test_one_process_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = report("4x_rtx4090", tmp_path, monkeypatch)
    assert (
        link_check(planned("recipe=qwen8b_lora", "distributed=single", "hardware=4x_rtx4090"), slow) is None
    )
