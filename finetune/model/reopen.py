"""Proves a saved model: opens the folder afresh, checks its tensors, and compares its loss with the live
model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedModel

from finetune.config.rules import RunFacts
from finetune.config.schema import AdapterConfig, Method, ModelConfig
from finetune.model.export import Written, checksum
from finetune.model.load import COMPUTE_DTYPE, model_config, open_weights, quantization
from finetune.model.vocabulary import make_room

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative difference of the two losses, by stored dtype: what rounding to it explains."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the saved model."""

    name: str
    passed: bool
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """What is remembered of the model in memory, to hold the saved one against."""

    loss: float
    """Mean negative log-likelihood of the supervised tokens of `batch`."""
    batch: dict[str, torch.Tensor]
    """Padded `input_ids`, `attention_mask`, `labels`, on the CPU."""
    start_sums: Mapping[str, float]
    """Checksums of the adapter's tensors before training; empty for full fine-tuning."""
    turn_end: int


def check_tensors(
    folder: Path, written: Written, live: LiveModel | None = None, trained: bool = True
) -> list[Check]:
    """Open every file of weights and hold each tensor against what was gathered from the live model."""
    sums: dict[str, float] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    empty, not_finite = [], []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = opened.get_tensor(name)
                sums[name] = checksum(tensor)
                shapes[name] = tuple(tensor.shape)
                if tensor.numel() == 0:
                    empty.append(name)
                if not bool(torch.isfinite(tensor).all()):
                    not_finite.append(name)
    missing = sorted(set(written.sums) - set(sums))
    both = set(sums) & set(written.sums)
    changed = sorted(n for n in both if (sums[n], shapes[n]) != (written.sums[n], written.shapes[n]))
    checks = [
        _listed(
            "all tensors are there",
            missing or (["no tensor at all"] if not sums else []),
            f"{len(sums)} tensors",
        ),
        _listed("no tensor is empty", empty, "none"),
        _listed("no tensor has NaN or infinity", not_finite, "none"),
        _listed(
            "tensors equal the trained ones" if live is not None else "tensors equal the merged ones",
            changed,
            "checksums equal",
        ),
    ]
    if live is not None and live.start_sums:
        still = sorted(name for name, start in live.start_sums.items() if trained and sums.get(name) == start)
        moved = len(live.start_sums) - len(still)
        # a matrix that no gradient reached keeps its start; all of lora_B at its start means nothing was
        # learnt
        learnt = any("lora_B" in name or "lora_A" not in name for name in set(live.start_sums) - set(still))
        detail = f"{moved} of {len(live.start_sums)} tensors moved"
        detail = detail if trained else "nothing could move: the learning rate was 0 at every step"
        checks.append(Check("the adapter left its start", learnt or not trained, detail))
    return checks


def check_loss(
    folder: Path,
    model: ModelConfig,
    adapter: AdapterConfig,
    live: LiveModel,
    dtype: torch.dtype,
    facts: RunFacts,
) -> list[Check]:
    """Load the folder as a user would and compare its loss on a fixed batch with the live model's."""
    compute = COMPUTE_DTYPE[facts.precision]
    reopened = open_saved(folder, model, adapter, compute, facts.device)
    batch = {key: tensor.to(reopened.device) for key, tensor in live.batch.items()}
    with torch.no_grad():
        logits = reopened(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten()).item()
    tolerance = TOLERANCE[dtype if adapter.method is not Method.qlora else torch.bfloat16]
    tolerance = max(tolerance, TOLERANCE[compute])
    same, detail = equal_losses(live.loss, loss, tolerance)
    stops = reopened.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    right = "generation stops where the training data stops"
    return [
        Check("reopened loss equals the live loss", same, detail),
        Check(right, live.turn_end in stops, f"stop tokens {stops}"),
        Check("the tokenizer is saved", len(tokenizer) > 0, f"{len(tokenizer)} tokens"),
    ]


def equal_losses(live: float, reopened: float, tolerance: float) -> tuple[bool, str]:
    """Equal as a share of the loss or, where it is near zero, in itself; the words name the rule."""
    difference = abs(reopened - live)
    share = difference / max(abs(live), 1e-6)
    detail = f"live {live:.6f}, reopened {reopened:.6f}, apart {share:.1e}, allowed {tolerance:.0e}"
    if share > tolerance:
        detail += f"; in absolute numbers {difference:.1e}, allowed {tolerance / 10:.0e}"
    return math.isfinite(reopened) and (share <= tolerance or difference <= tolerance / 10), detail


def open_saved(
    folder: Path, model: ModelConfig, adapter: AdapterConfig, compute: torch.dtype, device: str
) -> PreTrainedModel | PeftModel:
    """A fresh load of a saved model: the folder alone, or its adapter on the base model."""
    if adapter.method is Method.full:
        whole = ModelConfig(name_or_path=str(folder), trust_remote_code=model.trust_remote_code)
        return on_card(open_weights(model_config(whole), whole, compute, None), device)
    base = open_weights(model_config(model), model, compute, quantization(adapter, compute))
    make_room(base, folder)
    generation = base.generation_config.from_pretrained(folder)
    opened = PeftModel.from_pretrained(base, str(folder))
    opened.base_model.model.generation_config = generation
    return opened.eval() if adapter.method is Method.qlora else on_card(opened, device)


def on_card(model: Any, device: str) -> Any:
    """On this process's card when it has room for the weights and some more, else on the CPU."""
    model = model.eval()
    if device != "cuda":
        return model
    free, _ = torch.cuda.mem_get_info()
    needed = sum(parameter.nbytes for parameter in model.parameters()) * 1.2
    return model.cuda() if needed < free else model


def _listed(name: str, bad: list[str], good: str) -> Check:
    return Check(
        name, not bad, ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") or good
    )
