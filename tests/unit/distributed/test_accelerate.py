"""Each strategy's launch file: what it is (a golden file each), and that accelerate itself accepts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from finetune.config.compose import compose
from finetune.config.devices import Devices
from finetune.config.rules import resolve
from finetune.config.schema import Strategy
from finetune.config.strategy import TRAITS, Engine
from finetune.distributed.accelerate import launch_file, trainer_arguments, write_launch_file

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
EIGHT = Devices(gpus=8, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, bf16=True, driver_gpus=8, cpu_cores=64)
STRATEGIES = [strategy for strategy in Strategy if strategy is not Strategy.auto]


def rendered(strategy: Strategy, *words: str) -> dict[str, object]:
    processes = ["launch.num_processes=1"] if strategy is Strategy.single else []
    composed = compose(["recipe=qwen8b_lora", f"distributed={strategy}", *processes, *words])
    facts = resolve(composed.config, devices=EIGHT, given=composed.provenance)
    return launch_file(facts, composed.config.launch, composed.config.distributed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rendered_file_is_the_golden_one_and_accelerate_reads_it(
    strategy: Strategy, tmp_path: Path
) -> None:
    content = rendered(strategy)
    assert content == yaml.safe_load((GOLDEN / f"{strategy}.yaml").read_text(encoding="utf-8"))
    write_launch_file(tmp_path / "accelerate.yaml", content)
    read = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert read.distributed_type.value == TRAITS[strategy].launches_with
    assert read.num_processes == (1 if strategy is Strategy.single else 8)
    assert read.mixed_precision == "bf16"


def test_every_strategy_has_a_row_a_file_and_a_golden_file() -> None:
    assert set(TRAITS) == set(STRATEGIES)
    conf = {path.stem for path in (GOLDEN.parents[1] / "conf" / "distributed").glob("*.yaml")}
    assert conf == {str(strategy) for strategy in Strategy}
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {str(strategy) for strategy in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_number_that_the_trainer_owns_is_written_twice(strategy: Strategy) -> None:
    arguments = trainer_arguments(strategy, compose(["recipe=tiny_lora"]).config.distributed)
    deepspeed = arguments.get("deepspeed", {})
    assert bool(deepspeed) == (TRAITS[strategy].engine is Engine.deepspeed)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert deepspeed.get(name, "auto") == "auto"
    assert deepspeed.get("gradient_clipping", "auto") == "auto"
    assert "optimizer" not in deepspeed
    assert "scheduler" not in deepspeed


def test_two_machines_are_written_with_their_address(tmp_path: Path) -> None:
    words = [
        "launch.num_machines=2",
        "launch.main_process_ip=10.0.0.1",
        "launch.machine_rank=1",
        "run_name=x",
    ]
    content = rendered(Strategy.fsdp, *words)
    assert content["num_processes"] == 16
    assert (content["main_process_ip"], content["main_process_port"]) == ("10.0.0.1", 29500)
    write_launch_file(tmp_path / "accelerate.yaml", content)
    assert load_config_from_file(str(tmp_path / "accelerate.yaml")).machine_rank == 1
