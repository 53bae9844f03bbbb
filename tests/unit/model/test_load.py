"""4-bit layers on a CPU: evaluating a model must not change how it is trained."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

from finetune.config.schema import AdapterConfig, Method, ModelConfig
from finetune.model.load import keep_layout, model_config, open_weights, quantization
from tests.front_door import REPOSITORY


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are made as on a CPU with avx512_bf16, whatever this one has."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)


def layer(outputs: int = 64) -> Linear4bit:
    torch.manual_seed(0)
    made = Linear4bit(64, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    return made.requires_grad_(False)


def stored_bytes(asked: Linear4bit) -> torch.Tensor:
    """As numbers, some would be NaN."""
    return asked.weight.data.view(torch.uint8)


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


@pytest.mark.usefixtures("packs")
def test_a_model_that_was_opened_keeps_its_weights_when_it_is_evaluated() -> None:
    tiny = ModelConfig(name_or_path=str(REPOSITORY / "finetune" / "embedded" / "tiny"))
    quantised = quantization(AdapterConfig(method=Method.qlora), torch.float32)
    model = open_weights(model_config(tiny), tiny, torch.float32, quantised).eval()
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    before = [stored_bytes(layer).clone() for layer in layers]
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    assert layers
    assert all(map(torch.equal, before, map(stored_bytes, layers)))


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("outputs", [64, 16])
def test_a_layer_is_trained_behind_an_evaluation_as_before_it(outputs: int) -> None:
    asked = layer(outputs)
    keep_layout(asked)
    (before, gradient), (after, again) = around_an_evaluation(asked)
    assert gradient is not None
    assert again is not None
    assert torch.equal(before, after)
    assert torch.equal(gradient, again)


@pytest.mark.skipif(not has_avx512bf16(), reason="its kernel for packed weights needs a CPU with avx512_bf16")
def test_upstream_still_cuts_the_gradient() -> None:
    """Mended upstream? Then `keep_layout` can go."""
    (_, gradient), (_, again) = around_an_evaluation(layer())
    assert gradient is not None
    assert again is None


@pytest.mark.usefixtures("packs")
def test_upstream_still_fails_for_narrow_layers() -> None:
    with pytest.raises(AssertionError, match="divisible by block_n"):
        around_an_evaluation(layer(16))
