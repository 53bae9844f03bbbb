"""The plan of a run on a machine with cards: the driver is given, the rest is the product."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.config.devices import Devices
from finetune.errors import DoesNotFit, Refusal
from finetune.hardware import machine
from finetune.hardware.probe import Card
from finetune.planner.plan import Plan
from finetune.training import start
from finetune.training.start import CheckedRun, check_run, open_run

See = Callable[..., None]
H100 = Card("NVIDIA H100 80GB HBM3", "GPU-0", 9, 81_559 * 2**20)
SLICE = Card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "MIG-0", 8, 0)


@pytest.fixture
def with_cards(monkeypatch: pytest.MonkeyPatch) -> See:
    def see(*cards: Card) -> None:
        found = Devices(len(cards), tuple(card.name for card in cards), True, len(cards), cpu_cores=16)
        monkeypatch.setattr(machine, "usable_cards", lambda: cards)
        monkeypatch.setattr(machine, "probe_devices", lambda: found)
        monkeypatch.setattr(start, "probe_devices", lambda: found)

    return see


def planned(*words: str) -> tuple[CheckedRun, Plan]:
    run = check_run([*words, "hardware.host_memory_gb=1000"])
    assert isinstance(run.plan, Plan)
    return run, run.plan


def test_the_run_gets_what_the_plan_chose(with_cards: See) -> None:
    with_cards(H100, H100)
    words = ("recipe=qwen8b_qlora", "trainer.per_device_train_batch_size=auto")
    run, plan = planned(*words)
    assert run.facts.strategy is plan.chosen.strategy
    assert run.facts.num_processes == 2
    assert run.config.distributed.strategy == run.facts.requested_strategy == "auto"
    size = run.config.trainer.per_device_train_batch_size
    assert run.facts.batch.per_device == size > 1
    assert run.config.trainer.activation_checkpointing in (True, False)
    smaller, _ = planned(*words, "plan.margin=0.5")
    assert smaller.config.trainer.per_device_train_batch_size < size


def test_cards_that_are_not_here_are_not_believed(with_cards: See) -> None:
    with_cards(H100)
    with pytest.raises(Refusal, match=r"hardware\.num_gpus=4: a run takes place on this machine"):
        check_run(["recipe=qwen8b_lora", "hardware.num_gpus=4"])


def test_a_card_of_unknown_memory_is_run_on_without_a_plan(with_cards: See) -> None:
    with_cards(SLICE)
    run = check_run(["recipe=qwen8b_lora", "trainer.activation_checkpointing=true"])
    assert isinstance(run.plan, str)
    assert "it is not known" in run.lines[-1]
    with pytest.raises(Refusal, match=r"hardware\.memory_mib"):
        check_run(["recipe=qwen8b_lora", "trainer.activation_checkpointing=auto"])


def test_what_does_not_fit_is_refused_with_true_ways_out(with_cards: See, tmp_path: Path) -> None:
    with_cards(H100)
    words = ["recipe=llama8b_full", "distributed=single", f"output_dir={tmp_path / 'runs'}"]
    run, plan = planned(*words)
    with pytest.raises(DoesNotFit) as refusal:
        open_run(run)
    assert refusal.value.exit_code == 3
    assert not (tmp_path / "runs").exists()
    ways = [line.split(": ")[0] for line in plan.advice if "hardware=" not in line.split(": ")[0]]
    assert len(ways) >= 3
    for way in ways:
        assert planned(*words, *way.split())[1].fits, way
    went_on = open_run(planned(*words, "plan.enforce=false")[0])
    assert json.loads(went_on.plan.read_text())["fits"] is False


def test_the_reason_names_what_is_lacking(with_cards: See) -> None:
    with_cards(H100, H100, H100, H100)
    words = ("recipe=qwen8b_lora", "trainer.activation_checkpointing=true")
    assert isinstance(check_run([*words, "hardware.host_memory_gb=1000"]).plan, Plan)
    plan = check_run([*words, "hardware.host_memory_gb=40"]).plan
    assert isinstance(plan, Plan)
    first, second = plan.why.splitlines()
    assert first.startswith("zero3: ")
    assert "ddp, fsdp, zero1, zero2: more RAM than there is" in second


def test_without_a_global_batch_the_choice_does_not_change_what_is_learnt(with_cards: See) -> None:
    with_cards(H100, H100)
    words = ["recipe=qwen8b_lora", "hardware.host_memory_gb=24"]
    alone = check_run(words)
    assert (alone.facts.strategy, alone.facts.batch.global_size) == ("single", 64)
    assert any("(on 1 of 2 cards)" in line for line in alone.lines)
    both = check_run([*words, "trainer.global_batch_size=null"])
    assert both.facts.num_processes == 2
