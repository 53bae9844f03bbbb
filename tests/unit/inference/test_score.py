"""Rows are scored alike by the head that needs no whole logits and by the one that does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from finetune.inference import measure
from finetune.inference.load import add_fused_lm_head, has_plain_head
from tests.tiny_models import SIZES


def rows() -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(0)
    found = []
    for length in (9, 17, 4):
        ids = random.integers(1, 64, length).tolist()
        found.append((ids, [-100 if at % 3 == 1 else token for at, token in enumerate(ids)]))
    return found


def expected(model: torch.nn.Module) -> np.ndarray:
    lines = []
    for ids, labels in rows():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        learnt = wanted != -100
        nll = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        right = ((logits.argmax(-1) == wanted) & learnt).sum()
        lines.append([nll.item(), int(learnt.sum()), int(right)])
    return np.array(lines)


@pytest.mark.parametrize("adapted_head", [False, True])
def test_a_padded_batch_scores_as_its_rows_do_alone(
    adapted_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).eval()
    model: torch.nn.Module = plain
    if adapted_head:
        model = get_peft_model(plain, LoraConfig(r=4, target_modules=["lm_head"])).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 1.0)
    assert has_plain_head(plain) is not adapted_head
    with torch.inference_mode():
        wanted = expected(model)
        if not adapted_head:
            add_fused_lm_head(plain, outputs=("log_probs", "is_top1"))
        monkeypatch.setattr(measure, "POSITIONS_AT_ONCE", 5)
        found = measure.score(model, rows(), pad=0)
    assert found[:, 1:].tolist() == wanted[:, 1:].tolist()
    assert found[:, 0] == pytest.approx(wanted[:, 0], rel=1e-5)
