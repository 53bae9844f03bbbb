"""`finetune plan`: an answer in seconds, without torch, a card or the network, and how it ends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.config.compose import compose
from finetune.config.recipes import recipe_files
from finetune.errors import Refusal
from finetune.hardware.machine import catalogue
from finetune.planner.answer import answer
from finetune.planner.record import as_record
from tests.front_door import environment, finetune

GPU = {"weights", "gradients", "optimizer", "master_weights", "activations", "logits", "other"}


def plan(*words: str, at: Path) -> dict[str, Any]:
    done = finetune("plan", *words, "--json", at=at)
    assert done.code in (0, 3), done.err
    found = json.loads(done.out)
    assert done.code == (0 if all(p["fits"] for p in found.get("machines", [found])) else 3)
    return found


def test_the_answer_comes_without_torch_and_the_network(tmp_path: Path) -> None:
    script = (
        "import socket, sys\n"
        "def no(*a, **k): raise OSError('no network here')\n"
        "socket.create_connection = socket.socket.connect = no\n"
        "from finetune.cli import main\n"
        "assert main(['plan', 'recipe=qwen8b_full', 'hardware=4x_a100_80gb']) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 20  # two seconds on an idle machine
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert next(line for line in lines if "yes" in line).startswith("fsdp ")


def test_json_holds_every_strategy_and_adds_up(tmp_path: Path) -> None:
    found = plan("recipe=qwen8b_full", "distributed=zero3", "hardware=4x_a100_80gb", at=tmp_path)
    assert (found["chosen"], found["fits"]) == ("zero3", True)
    by_name = {option["strategy"]: option for option in found["strategies"]}
    assert set(by_name) == {
        *(
            "single",
            "ddp",
            "fsdp",
            "fsdp_offload",
            "zero1",
            "zero2",
            "zero2_offload",
            "zero3",
            "zero3_offload",
        )
    }
    parameters = 8_190_735_360
    for name, share in (("ddp", 16), ("zero3", 4), ("fsdp", 4)):
        gpu = by_name[name]["gpu"]
        states = sum(gpu[part] for part in ("weights", "gradients", "optimizer", "master_weights"))
        assert states == pytest.approx(parameters * share, rel=1e-6)
        assert set(gpu) >= GPU
        assert (
            gpu["peak_allocated"]["upper"] >= gpu["peak_allocated"]["expected"] >= states - gpu["gradients"]
        )
        assert gpu["peak_reserved"]["expected"] >= gpu["peak_allocated"]["expected"]
    assert not by_name["ddp"]["fits"]
    assert found["batch"]["global"] == 64
    assert by_name["zero3"]["step_seconds"] > 0


def test_what_does_not_fit_ends_with_3_and_says_what_would(tmp_path: Path) -> None:
    found = plan("recipe=llama8b_full", "hardware=1x_rtx4090", at=tmp_path)
    assert not found["fits"]
    ways = [advice.split(":")[0] for advice in found["advice"]]
    assert "adapter=qlora" in ways
    for way in ways:  # each of them is true
        fitting = plan(
            "recipe=llama8b_full",
            *(["hardware=1x_rtx4090"] if "hardware" not in way else []),
            way,
            at=tmp_path,
        )
        assert fitting["fits"], way


def test_machines_are_compared(tmp_path: Path) -> None:
    found = plan("recipe=qwen8b_qlora", "hardware=[1x_rtx4090,8x_h100_80gb]", at=tmp_path)
    one, eight = found["machines"]
    assert (one["chosen"], eight["chosen"]) == ("single", "ddp")
    fast, slow = (p["strategies"][0]["tokens_per_second"] for p in (eight, one))
    assert fast > 8 * slow
    text = finetune(
        "plan", "recipe=qwen8b_qlora", "hardware=[1x_rtx4090,8x_h100_80gb]", "--debug", at=tmp_path
    )
    assert [line.split()[:3] for line in text.out.splitlines()[-2:]] == [
        ["1x", "rtx4090", "single"],
        ["8x", "h100_80gb", "ddp"],
    ]


def test_steps_are_those_of_the_rows_and_a_short_row_takes_less_time(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "seven words that are a row here"}\n' * 100)
    words = ("recipe=qwen8b_qlora", "hardware=1x_h200", "trainer.global_batch_size=16")
    seen = plan(*words, f"data.train=[{{path: {rows}}}]", at=tmp_path)
    assert seen["batch"]["steps"] == 7
    few = plan(*words, f"data.train=[{{path: {rows}, limit: 10}}]", at=tmp_path)
    assert few["batch"]["steps"] == 1
    unknown = plan(*words, "trainer.max_steps=7", at=tmp_path)["strategies"][0]
    assert seen["strategies"][0]["seconds"] < unknown["seconds"]


def test_without_a_card_a_machine_is_found_that_has_the_processes(tmp_path: Path) -> None:
    words = ("plan", "recipe=llama8b_lora", "launch.num_processes=4", "--json")
    found = json.loads(finetune(*words, at=tmp_path, CUDA_VISIBLE_DEVICES="").out)
    assert found["hardware"]["num_gpus"] == 4
    assert found["strategies"][0]["num_processes"] == 4


def test_offloading_is_said_to_be_what_fits(tmp_path: Path) -> None:
    found = plan("recipe=llama70b_lora", "hardware=8x_rtx4090", at=tmp_path)
    assert found["why"].startswith("zero3_offload: ")
    assert "without offloading" not in found["why"]
    old = plan("recipe=llama8b_qlora", "hardware=1x_t4", "distributed=single", at=tmp_path)
    assert any("trainer.fp16=true" in way for way in old["advice"])


def test_a_price_becomes_a_cost(tmp_path: Path) -> None:
    words = ("recipe=qwen8b_qlora", "hardware=1x_rtx4090", "trainer.max_steps=1000")
    free = plan(*words, at=tmp_path)["strategies"][0]
    dear = plan(*words, "hardware.price_per_hour=0.5", at=tmp_path)["strategies"][0]
    short = plan(
        *(*words[:2], "trainer.max_steps=1"),
        "hardware.price_per_hour=0.5",
        "hardware.minimum_minutes=60",
        at=tmp_path,
    )["strategies"][0]
    assert free["cost"] is None
    assert dear["cost"] == pytest.approx(0.5 * dear["seconds"] / 3600)
    assert short["cost"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("hardware=rtx9090",), "rtx9090"),
        (("hardware=1x_h200", "hardware.num_gpus=-3"), "hardware.num_gpus=-3: must be greater than 0"),
        (("hardware=1x_h200", "hardware.price_per_hour=nan"), "hardware.price_per_hour=nan"),
        (("hardware=1x_h200", "plan.margin=-1"), "plan.margin=-1.0"),
        (("hardware=1x_h200", "launch.device=cpu"), "hardware=h200 is a card"),
        (("hardware=1x_h200", "hardware.link=string"), "hardware.link=string"),
        (("hardware.gpu=mine",), "hardware.memory_mib"),
        (("hardware=1x_h200", "distributed=ddp", "distributed.reshard_after_forward=false"), "reshard"),
    ],
)
def test_a_wrong_machine_is_refused(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = finetune("plan", "recipe=qwen8b_lora", *words, "--json", at=tmp_path)
    assert done.code == 2
    assert told in done.err


def test_a_shape_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **sizes}))
    words = (f"model.name_or_path={folder}", "data.train=[{path: rows.jsonl}]", "hardware=1x_t4")
    assert finetune("plan", *words, at=tmp_path).code == 0
    done = finetune("plan", *words, "model.shape.num_hidden_layers=3", at=tmp_path)
    assert done.code == 2
    assert "model.shape.num_hidden_layers=3" in done.err


def test_sizes_of_a_recipe_do_not_belong_to_another_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **sizes}))
    words = ("recipe=qwen8b_full", f"model.name_or_path={tmp_path}", "hardware=1x_t4", "distributed=single")
    weights = plan(*words, at=tmp_path)["strategies"][0]["gpu"]["weights"]
    assert weights < 1_000_000


def test_the_largest_batch_that_fits_is_taken_and_layers_run_once_where_there_is_room(tmp_path: Path) -> None:
    words = ("recipe=qwen8b_qlora", "data.max_length=512", "trainer.global_batch_size=12")
    auto = ("trainer.per_device_train_batch_size=auto", "trainer.activation_checkpointing=auto")
    seen = {card: plan(*words, f"hardware=1x_{card}", *auto, at=tmp_path) for card in ("t4", "b200")}
    small, large = (seen[card]["batch"] for card in seen)
    assert small["global"] == large["global"] == 12
    assert small["per_device"] < large["per_device"] == 12
    assert not large["activation_checkpointing"]
    chosen = (
        f"trainer.per_device_train_batch_size={small['per_device']}",
        f"trainer.activation_checkpointing={str(small['activation_checkpointing']).lower()}",
    )
    named = plan(*words, "hardware=1x_t4", *chosen, at=tmp_path)
    assert named["strategies"][0] == seen["t4"]["strategies"][0]
    assert small["activation_checkpointing"]
    larger = ("trainer.per_device_train_batch_size=6", chosen[1], "distributed=single")
    assert not plan(*words, "hardware=1x_t4", *larger, at=tmp_path)["fits"]


@pytest.mark.parametrize("recipe", ["llama8b_lora", "qwen8b_qlora", "qwen0_6b_full", "smollm2_135m_full"])
@pytest.mark.parametrize("card", ["a100_80gb", "h100_80gb", "rtx4090", "l40s"])
def test_more_cards_are_faster_by_as_much_as_usual(recipe: str, card: str) -> None:
    speeds = []
    for count in (1, 2, 4):
        strategy = "ddp" if count > 1 else "single"
        (planned,) = answer([f"recipe={recipe}", f"hardware={count}x_{card}", f"distributed={strategy}"])
        speeds.append(planned.plan.chosen.tokens_per_second)
    assert 1.7 <= speeds[1] / speeds[0] <= 1.9
    assert 3.0 <= speeds[2] / speeds[0] <= 3.7


def test_a_run_never_pretends_to_be_on_another_machine(tmp_path: Path) -> None:
    done = finetune("recipe=tiny_lora", "hardware=8x_h200", "--dry-run", at=tmp_path)
    assert done.code == 2
    assert "hardware=h200: a run takes place on this machine" in done.err


def test_every_recipe_has_a_plan() -> None:
    for name in recipe_files():
        (planned,) = answer([f"recipe={name}", "hardware=8x_h200"])
        assert json.dumps(as_record(planned.plan, planned.config))


def _random_words(chance: random.Random) -> list[str]:
    choices = {
        "recipe": sorted(recipe_files()),
        "hardware": [*["auto"] * 20, *(f"{n}x_{card}" for card in catalogue() for n in (1, 2, 4, 8))],
        "launch.device": ["auto", "cpu"],
        "distributed": ["auto", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero2_offload", "fsdp_offload"],
        "adapter": ["full", "lora", "qlora"],
        "data.max_length": ["1", "128", "4096"],
        "data.packing": ["true", "false"],
        "trainer.optim": ["adamw_torch", "adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor"],
        "trainer.per_device_train_batch_size": ["1", "3", "16", "auto"],
        "trainer.activation_checkpointing": ["true", "false", "auto"],
        "trainer.max_steps": ["1", "100"],
        "launch.num_machines": ["1", "2"],
        "plan.margin": ["0.0", "0.2"],
    }
    kept = ["recipe", "hardware", *chance.sample(sorted(choices.keys() - {"recipe", "hardware"}), k=4)]
    return [f"{key}={chance.choice(choices[key])}" for key in kept]


def answers_or_refuses(seed: int, count: int) -> int:
    """How many random configs got a plan; the others were refused in words."""
    chance, answered = random.Random(seed), 0
    for _ in range(count):
        words = _random_words(chance)
        try:
            (planned,) = answer(words)
        except Refusal:
            continue
        record = as_record(planned.plan, planned.config)
        assert json.dumps(record), words
        assert record["fits"] or "advice" in record, words
        answered += 1
    return answered


def test_random_configs_never_crash_it() -> None:
    assert answers_or_refuses(seed=1, count=25) > 10


@pytest.mark.soak
def test_a_thousand_random_configs_never_crash_it() -> None:
    assert answers_or_refuses(seed=2, count=1000) > 400


def test_a_recipe_composes_with_the_machine_in_its_config() -> None:
    config = compose(["recipe=tiny_lora", "hardware=4x_a100_80gb"]).config
    assert (config.hardware.gpu, config.hardware.num_gpus) == ("a100_80gb", 4)


def test_python_shows_the_same_plan_as_text_and_as_a_table() -> None:
    import finetune

    seen = finetune.plan("recipe=qwen8b_full", "distributed=zero3", "hardware=8x_h100_80gb")
    assert seen.fits
    assert seen.record["chosen"] == seen.table["strategy"][0] == "zero3"
    assert "zero3 was asked for" in repr(seen)
    assert "<table" in seen._repr_html_()
