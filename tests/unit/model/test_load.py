"""4-bit layers on a CPU: evaluating a model must not change how it is trained."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

from finetune.model.load import keep_layout

CAN_PACK = pytest.mark.skipif(
    not has_avx512bf16(), reason="bitsandbytes packs on CPUs with avx512_bf16 alone"
)


def layer(outputs: int = 64) -> Linear4bit:
    torch.manual_seed(0)
    made = Linear4bit(64, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    return made.requires_grad_(False)


def around_an_evaluation(asked: Linear4bit) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """What the layer gives in training, and the gradient that it hands on, before it and after it."""
    seen = []
    for _ in range(2):
        inputs = torch.linspace(-1, 1, 64).repeat(3, 1).requires_grad_()
        outputs = asked.train()(inputs)
        (gradient,) = torch.autograd.grad(outputs.pow(2).sum(), inputs, allow_unused=True)
        seen.append((outputs.detach(), gradient))
        with torch.no_grad():
            asked.eval()(inputs.detach())
    return seen


@pytest.mark.parametrize("outputs", [64, 16])
def test_a_layer_is_trained_behind_an_evaluation_as_before_it(outputs: int) -> None:
    asked = layer(outputs)
    keep_layout(asked)
    (before, gradient), (after, again) = around_an_evaluation(asked)
    assert gradient is not None
    assert again is not None
    assert torch.equal(before, after)
    assert torch.equal(gradient, again)


@CAN_PACK
def test_upstream_still_cuts_the_gradient() -> None:
    """Mended upstream? Then `keep_layout` can go."""
    (_, gradient), (_, again) = around_an_evaluation(layer())
    assert gradient is not None
    assert again is None


@CAN_PACK
def test_upstream_still_fails_for_narrow_layers() -> None:
    with pytest.raises(AssertionError, match="divisible by block_n"):
        around_an_evaluation(layer(16))
