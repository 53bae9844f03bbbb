"""`merge`: live model, reopened adapter and merged folder say the same; what cannot be merged is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from finetune.config.schema import AdapterConfig, Method
from finetune.model.adapter import attach_adapter
from finetune.model.compare import ALLOWED
from finetune.model.export import save_adapter
from tests.front_door import REPOSITORY, environment, finetune
from tests.tiny_models import SIZES, experts
from tests.unit.model.test_export import stored

TINY = REPOSITORY / "finetune" / "embedded" / "tiny"
VOCABULARY = 4096
BOTH = ["embed_tokens", "lm_head"]


@dataclass(frozen=True)
class Case:
    """A model, an adapter on it, and what the folder's tie flag must be."""

    tied: bool
    in_full: list[str] | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    still_tied: bool = False
    experts: bool = False
    added_tokens: int = 0


CASES = {
    "lora-tied": Case(tied=True, still_tied=True),
    "dora-tied-head": Case(tied=True, in_full=["lm_head"], adapter={"use_dora": True}),
    "rslora-tied-embedding": Case(tied=True, in_full=["embed_tokens"], adapter={"use_rslora": True}),
    "lora-tied-both": Case(tied=True, in_full=BOTH),
    "lora-tied-adapter-on-head": Case(tied=True, adapter={"target_modules": ["q_proj", "lm_head"]}),
    "dora-untied": Case(tied=False, adapter={"use_dora": True}),
    "lora-untied-head": Case(tied=False, in_full=["lm_head"]),
    "rslora-untied-both": Case(tied=False, in_full=BOTH, adapter={"use_rslora": True}),
    "lora-bfloat16": Case(tied=True, still_tied=True, dtype=torch.bfloat16),
    "dora-bfloat16": Case(tied=False, dtype=torch.bfloat16, adapter={"use_dora": True}),
    "experts": Case(tied=False, experts=True, adapter={"experts": True}),
    "experts-bfloat16": Case(tied=False, experts=True, adapter={"experts": True}, dtype=torch.bfloat16),
    "added-tokens": Case(tied=True, in_full=BOTH, added_tokens=2),
}


@dataclass(frozen=True)
class Made:
    """A saved adapter, its base, and the live model's logits."""

    folder: Path
    base: Path
    live: torch.Tensor


def build(case: Case) -> PreTrainedModel:
    if case.experts:
        model = experts()
        model.resize_token_embeddings(VOCABULARY)
        return model
    sizes = {**SIZES, "vocab_size": VOCABULARY}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=case.tied))


def make(name: str, at: Path) -> Made:
    """Save a base and a strong random adapter on it, in the way that a run saves one."""
    case, folder, base = CASES[name], at / name, at / f"{name}-base"
    torch.manual_seed(len(name))
    shutil.copytree(TINY, base, ignore=shutil.ignore_patterns("*.safetensors"))
    build(case).to(case.dtype).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if case.added_tokens:
        tokenizer.add_tokens([f"<new_{n}>" for n in range(VOCABULARY - len(tokenizer) + case.added_tokens)])
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = AdapterConfig(method=Method.lora, r=4, modules_to_save=case.in_full, **case.adapter)
    live = attach_adapter(model, config, seed=1).eval()
    for parameter in live.parameters():
        if parameter.requires_grad:
            parameter.data = (parameter.data + 0.05 * torch.randn_like(parameter)).to(case.dtype).float()
    folder.mkdir()
    save_adapter(live, folder, case.dtype, is_main=True)
    tokenizer.save_pretrained(folder)
    return Made(folder, base, logits(live))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    return model(input_ids=torch.arange(rows - 60, rows - 20).reshape(2, 20)).logits


MERGES = """
import io, json, sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from unittest.mock import patch
from finetune.cli import main

def half(tuner):
    for weight in tuner.get_base_layer().parameters(recurse=False):
        weight.data = weight.data.float()
    tuner.scaling["default"] /= 2
    tuner.merge(safe_merge=True)
    tuner.scaling["default"] *= 2

def full(tensors, path): raise OSError(28, "No space left on device")
def more(tensors, path):
    from safetensors.torch import save_file
    save_file({**tensors, "stray.weight": next(iter(tensors.values()))[:1].clone()}, path, {"format": "pt"})
def zeroed(shards):
    from finetune.model.export import save_file
    save_file({name: tensor * 0 for name, tensor in shards.buffer.items()}, shards._part(0))
    shards.files.append(list(shards.buffer))

results = []
for words, fault in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    broken = patch(fault[0], globals()[fault[1]]) if fault else nullcontext()
    with redirect_stdout(out), redirect_stderr(err), broken:
        code = main(["merge", *words])
    results.append([code, out.getvalue(), err.getvalue() + "torch is imported" * ("torch" in sys.modules)])
print(json.dumps(results))
"""


def merges(
    *commands: list[str], faults: list[tuple[str, str] | None] | None = None
) -> list[tuple[int, str, str]]:
    """Run `finetune merge WORDS` for several lists of words in one process."""
    pairs = [[words, faults[i] if faults else None] for i, words in enumerate(commands)]
    done = subprocess.run(
        [sys.executable, "-c", MERGES, json.dumps(pairs)],
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_live_reopened_and_merged_say_the_same(tmp_path: Path) -> None:
    made = {name: make(name, tmp_path) for name in CASES}
    results = merges(*([str(one.folder), "--json"] for one in made.values()))
    for (name, one), (code, out, err) in zip(made.items(), results, strict=True):
        case, target = CASES[name], tmp_path / f"{name}-merged"
        assert code == 0, f"{name}: {err}"
        told = json.loads(out)
        assert (told["model_path"], told["verified"]) == (str(target), True), name
        base = AutoModelForCausalLM.from_pretrained(one.base, dtype=torch.float32)
        if case.added_tokens:
            base.resize_token_embeddings(VOCABULARY + case.added_tokens)
        reopened = logits(PeftModel.from_pretrained(base, one.folder).eval())
        merged = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        largest = one.live.abs().max()
        assert (reopened - one.live).abs().max() <= 1e-4 * largest, name
        assert (logits(merged) - one.live).abs().max() <= ALLOWED[case.dtype] * largest, name
        assert (logits(merged) - one.live).norm() <= 0.01 * one.live.norm(), name
        assert merged.config.tie_word_embeddings == case.still_tied, name
        names = set(stored(one.base)) | ({"lm_head.weight"} if not case.still_tied else set())
        assert set(stored(target)) == names, name
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        assert (config["dtype"], "quantization_config" in config) == (str(case.dtype)[6:], False)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (target / file).read_bytes() == (one.folder / file).read_bytes()
        assert (target / "generation_config.json").exists()
        assert config["architectures"] == [type(merged).__name__]
    assert not list(tmp_path.glob(".*")), "something was left beside"


def test_a_qlora_run_is_merged_into_the_unquantised_base(tmp_path: Path) -> None:
    words = ["recipe=tiny_qlora", "trainer.max_steps=3", "trainer.learning_rate=2e-2", "launch.device=cpu"]
    words += ["data.train.0.limit=48", "trainer.warmup_steps=0"]
    run = finetune(*words, at=tmp_path)
    assert run.code == 0, run.err
    target, half = run.path / "merged", tmp_path / "half"
    first, second, third = merges(
        [str(run.path), "--json"],
        [str(run.path / "model"), f"--to={half}", "--dtype", "float16", "--json"],
        [str(half), "--dtype", "float32", "--json"],
    )
    assert (first[0], second[0], third[0]) == (0, 0, 0), first[2] + second[2] + third[2]
    told = json.loads(first[1])
    assert told["model_path"] == str(target)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert (logits(base) - logits(open_merged(target))).norm() > 0.05 * logits(base).norm()
    live = logits(PeftModel.from_pretrained(base, run.path / "model").eval())
    assert (logits(open_merged(target)) - live).norm() <= 0.01 * live.norm()
    assert (logits(open_merged(half)) - live).norm() <= 0.002 * live.norm()
    whole = tmp_path / "half-merged"
    assert torch.equal(logits(open_merged(whole)), logits(open_merged(half)))
    assert [json.loads((f / "config.json").read_text())["dtype"] for f in (target, half, whole)] == [
        told["dtype"],
        "float16",
        "float32",
    ]
    card = (target / "README.md").read_text(encoding="utf-8")
    for said in ("LoRA, rank 16, base in 4 bits", "behaviour.jsonl", "Training loss", "3 steps"):
        assert said in card
    assert str(REPOSITORY) not in card


def open_merged(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_what_cannot_be_merged_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    one = make("lora-tied", tmp_path)
    away, empty, other = tmp_path / "away", tmp_path / "empty", tmp_path / "other-base"
    empty.mkdir()
    shutil.copytree(one.folder, away)
    settings = json.loads((away / "adapter_config.json").read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (away / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    nameless = tmp_path / "nameless"
    shutil.copytree(one.folder, nameless)
    (nameless / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    shutil.copytree(one.base, other)
    wide = {**SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    Qwen3ForCausalLM(Qwen3Config(**wide)).save_pretrained(other)
    config = json.loads((one.base / "config.json").read_text(encoding="utf-8"))
    packed = tmp_path / "packed"
    shutil.copytree(one.base, packed)
    (packed / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}), encoding="utf-8"
    )
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    (unfinished / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    (unfinished / "report.json").write_text('{"status": "interrupted"}', encoding="utf-8")
    before = set(tmp_path.rglob("*"))
    folder = str(one.folder)
    cases: list[tuple[list[str], list[str]]] = [
        ([str(tmp_path / "nowhere")], [f"there is no folder {tmp_path / 'nowhere'}"]),
        ([str(empty)], ["holds no model: it is empty"]),
        ([str(unfinished)], ["no model yet: it was interrupted", "checkpoint-3"]),
        ([str(away)], [f"there is no folder {tmp_path / 'gone'}", "model.name_or_path=DIR"]),
        ([str(nameless)], ["does not say which model", "model.name_or_path=DIR"]),
        ([folder, f"--to={empty}", "--dtype", "int4"], ["2 problems", "nothing is ever overwritten", "int4"]),
        ([folder, f"model.name_or_path={packed}"], ["stored quantised (bitsandbytes)"]),
        ([folder, "trainer.max_steps=3"], ["trainer.max_steps"]),
        ([folder, "--push", "me"], ["expected hub://OWNER/NAME"]),
        ([folder, "--push", "hub://me/x"], ["nobody is logged in", "cannot be reached"]),
        ([folder, "--dtype"], ["--dtype needs a value"]),
        ([folder, "--dry-run"], ["--dry-run belongs to train"]),
        ([], ["merge takes one RUN"]),
        ([folder, f"model.name_or_path={other}"], ["does not fit this base", "have no place"]),
    ]
    moved = [str(away), f"model.name_or_path={one.base}"]
    *refused, last = merges(*(words for words, _ in cases), moved)
    for (words, said), (code, out, err) in zip(cases, refused, strict=True):
        assert code == 2, f"{words}: {out} {err}"
        assert all(text in err for text in said), f"{words}: {err}"
        assert "Traceback" not in err
        assert "does not fit" in said[0] or "torch is imported" not in err, words
    assert last[0] == 0, last[2]
    shutil.rmtree(tmp_path / "away-merged")
    assert set(tmp_path.rglob("*")) == before


FAULTS = {
    "opened afresh it equals the source": ("finetune.model.merge.merge_in_float32", "half"),
    "merged in float32 it equals the source": ("finetune.model.float32.merge_in_float32", "half"),
    "tensors equal the merged ones": ("finetune.model.export._Shards._flush", "zeroed"),
    "plain transformers finds every weight, and no other": ("finetune.model.export.save_file", "more"),
    "could not be written, and nothing is kept": ("finetune.model.export.save_file", "full"),
}
"""What is said, and what went wrong."""


def test_a_merge_that_went_wrong_is_not_handed_over(tmp_path: Path) -> None:
    one = make("dora-untied", tmp_path)
    before = set(tmp_path.rglob("*"))
    words = [str(one.folder), "--dtype", "float16"]
    results = merges(*[words] * len(FAULTS), words, faults=[*FAULTS.values(), None])
    for (said, _), (code, out, err) in zip(FAULTS.items(), results, strict=False):
        assert (code, said in err, "Traceback" in err) == (1, True, False), f"{said}: {out} {err}"
    advised = [said for said, result in zip(FAULTS, results, strict=False) if "--dtype float32" in result[2]]
    assert advised == ["opened afresh it equals the source"], "no dtype mends what is not rounding"
    assert "rounding to float16 alone parts them, --dtype float32 passes" in results[0][2]
    assert results[-1][0] == 0, results[-1][2]
    shutil.rmtree(tmp_path / "dora-untied-merged")
    assert set(tmp_path.rglob("*")) == before
