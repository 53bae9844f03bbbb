"""What a config comes to on a machine, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from finetune.config import packages
from finetune.config.compose import compose
from finetune.config.devices import Devices
from finetune.config.rules import RunFacts, check, resolve
from finetune.config.schema import Strategy
from finetune.errors import Problem, Refusal

CPU = Devices(cpu_cores=2)
GPUS = Devices(gpus=8, gpu_names=("NVIDIA H100",) * 8, bf16=True, driver_gpus=8, cpu_cores=64)
OLD_GPU = Devices(gpus=1, gpu_names=("Tesla V100",), bf16=False, driver_gpus=1, cpu_cores=8)
UNSEEN = Devices(driver_gpus=2, cpu_cores=8, unusable="the installed torch is built without CUDA")


BASE = (
    "adapter=lora",
    "data.train=${embedded:behaviour.jsonl}",
    "trainer.global_batch_size=64",
    "trainer.per_device_train_batch_size=4",
    "trainer.warmup_steps=0.1",
)


def facts(*overrides: str, devices: Devices = CPU, world: int | None = None, model: str = "tiny") -> RunFacts:
    composed = compose([f"model={model}", *BASE, *overrides])
    return resolve(
        composed.config, devices=devices, world=world, given=composed.provenance, subject=composed.subject
    )


def refusal(*overrides: str, devices: Devices = CPU, world: int | None = None, model: str = "tiny") -> str:
    with pytest.raises(Refusal) as refused:
        facts(*overrides, devices=devices, world=world, model=model)
    return str(refused.value)


def config_json(folder: Path, **sizes: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    return str(folder)


# the batch


def test_accumulation_follows_from_the_global_batch_and_is_printed_with_its_arithmetic() -> None:
    words = ["trainer.global_batch_size=64", "trainer.per_device_train_batch_size=4", "distributed=ddp"]
    batch = facts(*words, devices=GPUS).batch
    assert batch.line == "global batch 64 = 4 per device x 8 processes x 2 accumulation"
    assert batch.global_size == 64


def test_the_global_batch_stays_when_the_number_of_processes_changes() -> None:
    sizes = {facts(f"launch.num_processes={n}", "launch.device=cpu").batch.global_size for n in (1, 2)}
    assert sizes == {64}


def test_a_global_batch_that_does_not_divide_names_the_nearest_ones() -> None:
    text = refusal(
        "trainer.global_batch_size=50", "trainer.per_device_train_batch_size=3", "launch.num_processes=2"
    )
    assert "trainer.global_batch_size=50: not a multiple of 3 per device x 2 processes = 6" in text
    assert "Nearest: 48 or 54. Or keep it with trainer.per_device_train_batch_size=1." in text
    assert "Nearest: 8." in refusal("trainer.global_batch_size=4", "trainer.per_device_train_batch_size=8")


def test_accumulation_that_disagrees_with_the_global_batch_is_refused_with_both_values() -> None:
    text = refusal("trainer.global_batch_size=64", "trainer.gradient_accumulation_steps=3")
    assert "trainer.gradient_accumulation_steps=3 and trainer.global_batch_size=64" in text
    assert "it becomes 16" in text
    assert facts("trainer.gradient_accumulation_steps=16").batch.accumulation == 16


def test_without_a_global_batch_accumulation_is_as_set() -> None:
    words = ["trainer.global_batch_size=null", "trainer.gradient_accumulation_steps=3"]
    assert facts(*words).batch.global_size == 12
    assert facts(words[0]).batch.accumulation == 1


# the learning rate


def test_the_learning_rate_is_scaled_only_when_asked() -> None:
    words = ["trainer.global_batch_size=32", "trainer.base_global_batch_size=8", "trainer.learning_rate=1e-4"]
    assert facts(*words).learning_rate == 1e-4
    assert any("sqrt scaling is usual for Adam" in note for note in facts(*words).notes)
    assert any("linear scaling is usual for SGD" in note for note in facts(*words, "trainer.optim=sgd").notes)
    scaled = facts(*words, "trainer.scale_learning_rate=sqrt")
    assert scaled.learning_rate == pytest.approx(2e-4)
    assert "learning rate 0.0002 = 0.0001 x sqrt(32 / 8)" in scaled.notes
    assert facts(*words, "trainer.scale_learning_rate=linear").learning_rate == pytest.approx(4e-4)
    unwarmed = facts(*words, "trainer.scale_learning_rate=sqrt", "trainer.warmup_steps=0")
    assert any("wants warm-up" in note for note in unwarmed.notes)


def test_scaling_needs_to_know_from_where() -> None:
    assert "trainer.base_global_batch_size" in refusal("trainer.scale_learning_rate=linear")


# device and processes


def test_auto_takes_the_gpus_and_ddp_when_there_are_several() -> None:
    found = facts(devices=GPUS)
    assert (found.device, found.num_processes, found.strategy) == ("cuda", 8, Strategy.ddp)
    assert found.requested_strategy is Strategy.auto
    assert facts(devices=OLD_GPU).strategy is Strategy.single
    assert facts("distributed=single", devices=GPUS).num_processes == 1


def test_only_models_marked_small_enough_run_on_a_cpu_by_themselves() -> None:
    assert facts().device == "cpu"
    assert "model.cpu=true" in refusal(model="qwen8b")
    assert facts("launch.device=cpu", model="qwen8b").device == "cpu"


def test_a_card_that_the_driver_shows_and_torch_cannot_use_is_never_a_cpu_run() -> None:
    text = refusal(devices=UNSEEN)
    assert (
        "the NVIDIA driver shows 2 GPUs that torch cannot use: the installed torch is built without CUDA"
        in text
    )
    assert facts("launch.device=cpu", devices=UNSEEN).device == "cpu"


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["launch.device=cuda"], CPU, "no GPU is here"),
        (["launch.num_processes=9"], GPUS, "each process needs a GPU of its own, and 8 can be used"),
        (["distributed=single", "launch.num_processes=2"], CPU, "each would train the whole run by itself"),
        (["distributed.reshard_after_forward=false"], CPU, "a setting of fsdp; the strategy is single"),
        (["launch.num_machines=2", "launch.num_processes=4"], GPUS, "Set launch.main_process_ip"),
        (
            ["launch.num_machines=2", "launch.num_processes=3", "launch.main_process_ip=10.0.0.1"],
            GPUS,
            "Use a multiple of 2",
        ),
        (
            ["launch.num_machines=2", "launch.machine_rank=2", "launch.main_process_ip=10.0.0.1"],
            GPUS,
            "machines are numbered 0 to 1",
        ),
        (["launch.main_process_port=70000"], CPU, "must be between 1 and 65535"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(words: list[str], devices: Devices, message: str) -> None:
    assert message in refusal(*words, devices=devices)


def test_a_port_in_use_is_refused_by_its_number() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"launch.main_process_port={port}: the port cannot be used" in refusal(
            f"launch.main_process_port={port}"
        )
    assert facts(f"launch.main_process_port={port}").num_processes == 1


def test_the_processes_of_another_launcher_count_and_a_difference_is_refused() -> None:
    assert facts(world=2).num_processes == 2
    assert facts(world=2).strategy is Strategy.ddp
    assert "launch.num_processes=4: the launcher started 2" in refusal("launch.num_processes=4", world=2)


def test_deepspeed_without_its_package_or_its_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts("distributed=zero2").strategy is Strategy.zero2
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "DeepSpeed compiles an operation with no-such-compiler" in refusal("distributed=zero2")
    assert facts("distributed=zero2", devices=GPUS).strategy is Strategy.zero2
    assert facts("distributed=zero3_offload", devices=GPUS).strategy is Strategy.zero3_offload
    hide(monkeypatch, "deepspeed")
    assert "needs deepspeed, which is not installed" in refusal("distributed=zero2", devices=GPUS)


def hide(monkeypatch: pytest.MonkeyPatch, package: str, found: str | None = None) -> None:
    """Make one package look as if it were not installed, or installed in another version."""
    real = packages.version

    def version(name: str) -> str:
        if name == package and found is None:
            raise packages.PackageNotFoundError(name)
        return found if name == package and found else real(name)

    monkeypatch.setattr(packages, "version", version)


# precision


@pytest.mark.parametrize(
    ("words", "devices", "precision", "reason"),
    [
        ([], CPU, "fp32", "on CPU"),
        ([], GPUS, "bf16", "NVIDIA H100 computes in bf16"),
        ([], OLD_GPU, "fp32", "Tesla V100 has no bf16; trainer.fp16=true is faster"),
        (["trainer.bf16=true"], CPU, "bf16", "trainer.bf16=true"),
        (["trainer.bf16=false"], GPUS, "fp32", "trainer.bf16=false"),
        (["trainer.fp16=true"], OLD_GPU, "fp16", "trainer.fp16=true"),
    ],
)
def test_precision_is_what_was_asked_or_what_the_device_is_good_at(
    words: list[str], devices: Devices, precision: str, reason: str
) -> None:
    found = facts(*words, devices=devices)
    assert found.precision == precision
    assert reason in found.precision_reason
    assert found.trained_dtype == "float32"


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["trainer.bf16=true", "trainer.fp16=true"], GPUS, "only one of them can be"),
        (["trainer.fp16=true"], CPU, "a CPU does not train in fp16; it can in fp32 and bf16"),
        (["trainer.bf16=true"], OLD_GPU, "Tesla V100 does not compute in bf16; it does in fp32 and fp16"),
        (["model.dtype=float16"], CPU, "model.dtype=float16: a CPU does not train in fp16"),
        (["model.dtype=bfloat16"], OLD_GPU, "model.dtype=bfloat16: Tesla V100 does not compute in bf16"),
        (["model.dtype=float8"], CPU, "expected float32, bfloat16 or float16"),
        (["adapter=full", "model.dtype=float16"], GPUS, "gradients cannot be unscaled"),
        (["adapter=full", "model.dtype=bfloat16", "trainer.bf16=false"], GPUS, "are computed in bf16"),
        (["trainer.tf32=true"], CPU, "Ampere"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(words: list[str], devices: Devices, message: str) -> None:
    assert message in refusal(*words, devices=devices)


def test_trained_weights_are_float32_unless_the_user_chooses_and_then_it_is_said() -> None:
    assert facts("adapter=full", devices=GPUS).trained_dtype == "float32"
    chosen = facts("adapter=full", "model.dtype=bfloat16", devices=GPUS)
    assert chosen.trained_dtype == "bfloat16"
    assert any("small updates are lost" in note for note in chosen.notes)


def test_an_adapter_trains_in_float32_beside_frozen_weights_of_the_compute_precision() -> None:
    found = facts(devices=GPUS)
    assert (found.trained_dtype, found.frozen_dtype) == ("float32", "bfloat16")
    assert facts("model.dtype=float32", devices=GPUS).frozen_dtype == "float32"
    halved = facts("model.dtype=bfloat16")
    assert (halved.trained_dtype, halved.frozen_dtype, halved.precision) == ("float32", "bfloat16", "bf16")


# model and adapter


def test_length_beyond_the_positions_needs_rope_scaling() -> None:
    assert "the model has 1024 positions" in refusal("data.max_length=2048")
    scaled = facts("data.max_length=2048", "model.rope_scaling={rope_type: yarn, factor: 2.0}")
    assert scaled.positions == 2048
    assert "rope_type and factor" in refusal("model.rope_scaling={factor: 2.0}")
    original = "model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 512}"
    assert facts("data.max_length=2048", original).positions == 2048
    assert "2048 positions with rope_scaling factor 4" in refusal("data.max_length=2049", original)


def test_the_sizes_of_a_local_folder_count_before_those_of_conf(tmp_path: Path) -> None:
    folder = config_json(tmp_path / "m", model_type="llama", max_position_embeddings=128)
    assert "the model has 128 positions" in refusal(f"model.name_or_path={folder}", "data.max_length=256")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "the folder has no config.json; it holds: tokenizer.json"),
        ("", "config.json: it is empty"),
        ('{"model_type": ', "config.json: it is no JSON: Expecting value: line 1 column 16"),
        ("[]", "config.json: expected a mapping, got a list"),
    ],
)
def test_a_folder_that_cannot_be_opened_as_a_model_is_refused_by_every_verb(
    content: str | None, why: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").touch()
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(Refusal, match=re.escape(why)):
        compose(["recipe=tiny_lora", f"model.name_or_path={tmp_path}"])


def test_a_model_without_a_name_cannot_be_trained_and_its_tokenizer_can_be_used(tmp_path: Path) -> None:
    folder = config_json(tmp_path / "m", max_position_embeddings=128)
    assert "it does not say which model this is (model_type)" in refusal(f"model.name_or_path={folder}")
    compose(["recipe=tiny_lora", f"model.name_or_path={folder}"])


def test_an_address_is_no_folder_for_runs() -> None:
    told = refusal("output_dir=s3://bucket/runs")
    assert "output_dir=s3://bucket/runs: a run is written to a folder of this machine" in told
    assert "checkpoint.remote=ADDRESS" in told


def test_packing_with_linear_attention_is_refused_with_the_reason(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    folder = config_json(tmp_path / "m", model_type="new", text_config={"layer_types": layers})
    assert "carry their state" in refusal(f"model.name_or_path={folder}", "data.packing=true")
    named = config_json(tmp_path / "n", model_type="qwen3_next")
    assert "qwen3_next has layers of linear attention" in refusal(
        f"model.name_or_path={named}", "data.packing=true"
    )
    assert facts("data.packing=true").device == "cpu"


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (["adapter=full", "adapter.r=8"], CPU, "adapter.r=8: it has no effect with adapter=full"),
        (["adapter.bits=8"], CPU, "it has no effect with adapter=lora"),
        (["adapter.target_modules=[q_proj,lm_head]"], CPU, "an adapter on it would never be trained"),
        (["adapter.experts=true"], CPU, "qwen3 has no experts"),
        (["trainer.router_aux_loss_coef=0.1"], CPU, "qwen3 has no experts"),
        (["adapter.init_from=/no/such"], CPU, "there is no adapter"),
        (["adapter.r=0"], CPU, "adapter.r=0: must be greater than 0"),
        (["adapter.lora_dropout=1"], CPU, "must be at least 0 and below 1"),
        (["adapter=qlora", "adapter.bits=3"], CPU, "must be 4 or 8"),
        (["adapter=qlora", "adapter.quant_type=int4"], CPU, "must be nf4 or fp4"),
        (["adapter=qlora", "adapter.bits=8", "distributed=fsdp"], GPUS, "only shard floating-point weights"),
        (["adapter=qlora", "model.dtype=float32", "distributed=fsdp"], GPUS, "or use bfloat16"),
        (["model.name_or_path=/no/such"], CPU, "there is no such folder"),
        (["model.chat_template=nothing.jinja"], CPU, "there is no such file"),
        (["model.attn_implementation=flash_attention_2"], CPU, "runs on GPUs only"),
        (
            ["distributed=ddp", "trainer.activation_checkpointing_kwargs={use_reentrant: true}"],
            GPUS,
            "first backward pass fails",
        ),
    ],
)
def test_a_model_or_adapter_that_cannot_be_is_refused(
    words: list[str], devices: Devices, message: str
) -> None:
    assert message in refusal(*words, devices=devices)


def test_adapter_keys_of_a_recipe_do_not_stand_in_the_way_of_another_method(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("adapter: {r: 64}")
    assert facts(f"recipe={tmp_path / 'wide.yaml'}", "adapter=full").device == "cpu"


def test_qlora_needs_bitsandbytes_and_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("slow" in note for note in facts("adapter=qlora").notes)
    hide(monkeypatch, "bitsandbytes", "0.40.0")
    assert "needs bitsandbytes 0.46.1 or newer, found 0.40.0" in refusal("adapter=qlora")
    hide(monkeypatch, "bitsandbytes")
    assert "adapter=qlora: needs bitsandbytes, which is not installed" in refusal("adapter=qlora")
    assert "trainer.optim=paged_adamw_8bit: needs bitsandbytes" in refusal("trainer.optim=paged_adamw_8bit")


# trainer, data, tracking


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.learning_rate=0"], "trainer.learning_rate=0.0: must be greater than 0"),
        (["trainer.learning_rate=nan"], "must be greater than 0"),
        (["trainer.max_steps=0"], "must be greater than 0, or -1"),
        (["trainer.average_tokens_across_devices=false"], "the loss depends on how rows are spread"),
        (["trainer.optim=galore_adamw"], "needs galore-torch, which is not installed"),
        (["trainer.optim=paged_adamw_8bit", "distributed=fsdp"], "issues/1633"),
        (["trainer.eval_strategy=steps"], "trainer.eval_strategy=steps: there are no rows for evaluation"),
        (["trainer.lr_scheduler_type=reduce_lr_on_plateau"], "there are no rows for evaluation"),
        (
            ["trainer.lr_scheduler_type=reduce_lr_on_plateau", "data.eval_fraction=0.1"],
            "it follows the evaluation loss",
        ),
        (["data.eval=/etc/hosts", "data.eval_fraction=0.1"], "both give rows"),
        (["data.train=/no/such.jsonl"], "data.train.0.path=/no/such.jsonl: there is no such file"),
        (["data.max_dropped=1.5"], "must be between 0 and 1"),
        (["data.train.0.limit=0"], "data.train.0.limit=0"),
        (["trainer.ddp_static_graph=true"], "a setting of ddp; the strategy is single"),
        (["trainer.dataloader_prefetch_factor=2"], "dataloader_num_workers above 0"),
        (["trainer.loss_type=dft", "trainer.label_smoothing_factor=0.1"], "knows no label smoothing"),
        (["trainer.project=mine"], "only trackio reads it"),
        (["checkpoint.keep=0"], "must be greater than 0"),
        (["seed=-1"], "must be between 0 and 4294967295"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(words: list[str], message: str) -> None:
    assert message in refusal(*words)


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "wandb")
    assert "tracking=wandb: needs the package wandb, which is not installed" in refusal("tracking=wandb")


def test_rows_for_evaluation_that_nobody_reads_are_mentioned() -> None:
    assert any("nothing is evaluated" in note for note in facts("data.eval_fraction=0.1").notes)
    assert not any(
        "evaluated" in n for n in facts("data.eval_fraction=0.1", "trainer.eval_strategy=epoch").notes
    )


def test_steps_win_over_epochs_and_the_winner_is_told() -> None:
    notes = facts("trainer.max_steps=20", "trainer.num_train_epochs=2").notes
    assert "trainer.max_steps=20 ends the run; trainer.num_train_epochs=2 is not used" in notes
    assert "is not used" not in " ".join(facts("trainer.max_steps=20").notes)


# all at once


def test_every_problem_of_keys_and_rules_is_in_one_message() -> None:
    problems: list[Problem] = []
    words = [
        "trainer.lerning_rate=1",
        "trainer.global_batch_size=7",
        "trainer.fp16=true",
        "data.max_length=9999",
    ]
    composed = compose(["recipe=tiny_lora", *words], problems=problems)
    with pytest.raises(Refusal) as refused:
        resolve(composed.config, devices=CPU, problems=problems, subject=composed.subject)
    text = str(refused.value)
    assert text.startswith("4 problems in recipe 'tiny_lora':")
    for key in ("trainer.lerning_rate=1", "global_batch_size=7", "trainer.fp16=true", "data.max_length=9999"):
        assert re.search(rf"^  .*{re.escape(key)}", text, re.MULTILINE)


def test_check_lists_problems_without_raising() -> None:
    config = compose(["recipe=tiny_lora", "trainer.learning_rate=-1"]).config
    assert [p.where for p in check(config, devices=CPU)] == ["trainer.learning_rate=-1.0"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles with g++ on a CPU")
@pytest.mark.parametrize("strategy", [s.value for s in Strategy if s is not Strategy.single])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_method_is_accepted_under_every_strategy_with_two_cpu_processes(
    method: str, strategy: str
) -> None:
    words = [f"distributed={strategy}", "launch.device=cpu", "launch.num_processes=2"]
    assert facts(*words, f"adapter={method}").num_processes == 2


def test_a_trained_copy_of_a_tied_matrix_is_refused_under_fsdp() -> None:
    words = ["recipe=tiny_lora", "adapter.modules_to_save=[lm_head]", "launch.num_processes=2"]
    for strategy in ("fsdp", "fsdp_offload"):
        with pytest.raises(Refusal, match="embedding and head of this model are one matrix"):
            resolve(compose([*words, f"distributed={strategy}"]).config, devices=Devices(cpu_cores=2))
    resolve(compose([*words, "distributed=zero3"]).config, devices=Devices(cpu_cores=2))
