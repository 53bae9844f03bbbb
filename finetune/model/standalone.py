"""From a saved model to one whole folder of it: written beside its place, proved, and only then put there."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from finetune.errors import RunFailed
from finetune.model.compare import answer, apart, fixed_prompts, read, same_answer, same_logits
from finetune.model.load import checkpoint_class
from finetune.model.merge import open_source, source_tokenizer, write_merged, write_words
from finetune.model.reopen import Check, check_tensors, on_card
from finetune.model.source import Source
from finetune.progress import stage

log = logging.getLogger(__name__)

WORTH_TELLING = 0.05
"""Share of an adapter's effect that rounding may take without a word."""


@dataclass(frozen=True, slots=True)
class Standalone:
    """What was written, and what was found when it was opened afresh."""

    path: Path
    dtype: str
    tensors: int
    difference: float
    """Largest absolute difference of two logits, the source's and the written model's."""
    lost: float | None
    """Share of what the adapter changes in the logits that rounding takes; null without an adapter."""
    checks: list[Check]

    def as_dict(self) -> dict[str, Any]:
        """What scripts read."""
        return {
            "model_path": str(self.path),
            "max_logit_difference": self.difference,
            "verified": all(check.passed for check in self.checks),
            "dtype": self.dtype,
            "tensors": self.tensors,
            "adapter_share_lost": self.lost,
            "checks": [check.as_dict() for check in self.checks],
        }


def write_standalone(
    source: Source, target: Path, dtype_name: str | None, samples: list[dict[str, Any]], card: str
) -> Standalone:
    """Merge, write, prove; nothing is left behind unless every check has passed."""
    beside = target.with_name(f".{target.name}-unverified-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        with stage("merging   and checking"):
            made = _write_and_prove(source, beside, target, dtype_name, samples)
        (beside / "README.md").write_text(card, encoding="utf-8")
        if target.exists():
            raise RunFailed(f"{target} has appeared meanwhile; it is left as it is, and nothing is kept.")
        beside.rename(target)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{target} could not be written, and nothing is kept: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return made


def _write_and_prove(
    source: Source, folder: Path, target: Path, dtype_name: str | None, samples: list[dict[str, Any]]
) -> Standalone:
    """The source is let go before the written model is opened: two models are never held at once."""
    trusted = source.model.trust_remote_code
    tokenizer = source_tokenizer(source)
    prompts = fixed_prompts(tokenizer, samples)
    model, stored = open_source(source)
    dtype = getattr(torch, dtype_name) if dtype_name else stored
    what = f"{source.method} on {source.model.name_or_path}" if source.adapter else str(source.folder)
    log.info("source    %s (%s, unquantised)", what, _name(stored))
    model = on_card(model, _device())
    logits, said = read(model, prompts), answer(model, prompts)
    base, checks = None, []
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            base = read(model, prompts)
        merged = read(model, prompts, merged=True)
        checks += _require(
            [same_logits("merged in float32 it equals the source", logits, merged, torch.float32)]
        )
    write_words(source, tokenizer, model, folder)
    written = write_merged(model.cpu(), folder, dtype)
    del model
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    log.info("written   %s tensors, %s bytes, %s", f"{len(written.sums):,}", f"{size:,}", _name(dtype))
    checks += _require(check_tensors(folder, written))
    again, whole = _open_afresh(folder, trusted)
    checks += _require([whole])
    found = read(again, prompts)
    rounded_to = torch.float32 if source.adapter is None and dtype is stored else dtype
    same = same_logits("opened afresh it equals the source", logits, found, rounded_to)
    answered = same_answer(said, answer(again, prompts), logits, rounded_to, tokenizer)
    checks += _require([same, answered], rounded_to)
    return Standalone(
        target,
        _name(dtype),
        len(written.sums),
        apart(logits, found),
        _lost(logits, found, base, dtype),
        checks,
    )


def _require(checks: list[Check], rounded_to: torch.dtype = torch.float32) -> list[Check]:
    """Say what was found, and stop when something is wrong."""
    for check in checks:
        log.info("%s %s (%s)", "checked  " if check.passed else "FAILED   ", check.name, check.detail)
    failed = [f"  {check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        listed = "\n".join(failed)
        if rounded_to is not torch.float32:
            listed += f"\n  Where rounding to {_name(rounded_to)} alone parts them, --dtype float32 passes."
        raise RunFailed(f"the merged model did not pass its checks, and is not kept:\n{listed}")
    return checks


def _open_afresh(folder: Path, trusted: bool) -> tuple[PreTrainedModel, Check]:
    """What any program would do with the folder: plain transformers, the class that it names."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    model, said = checkpoint_class(config).from_pretrained(
        folder, dtype="auto", trust_remote_code=trusted, output_loading_info=True
    )
    wrong = [f"{kind}: {name}" for kind in ("missing_keys", "unexpected_keys") for name in sorted(said[kind])]
    detail = ", ".join(wrong[:5]) or f"{type(model).__name__}, transformers {transformers.__version__}"
    check = Check("plain transformers finds every weight, and no other", not wrong, detail)
    return on_card(model, _device()), check


def _lost(
    logits: torch.Tensor, found: torch.Tensor, base: torch.Tensor | None, dtype: torch.dtype
) -> float | None:
    """How much of the adapter's effect rounding takes (root mean square), told where it is noticeable."""
    if base is None:
        return None
    effect = (logits - base).norm().item()
    share = (logits - found).norm().item() / effect if effect else 0.0
    if share > WORTH_TELLING:
        log.info(
            "note      rounding to %s takes %.0f%% of what the adapter changes in the logits: its updates "
            "are small beside the weights. --dtype float32 keeps them.",
            *(_name(dtype), 100 * share),
        )
    return share


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
