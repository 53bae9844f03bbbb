"""Opens the models that are asked: in the machine's precision or in 4 or 8 bits, an adapter on its base."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head

from finetune.config.schema import ModelConfig
from finetune.errors import refuse
from finetune.inference.subject import BASE, Weights
from finetune.model.load import free_memory, model_config, open_weights, quantization
from finetune.model.merge import open_source, source_tokenizer
from finetune.model.reopen import open_saved
from finetune.model.source import Source, model_folder
from finetune.model.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

OF_ADAPTER = ("lora_", "modules_to_save", "trainable_tokens")
"""Parts of the names of an adapter's own weights, which stay in float32 as they were trained."""


@dataclass(slots=True)
class Models:
    """The base and the tuned model, opened when they are needed."""

    tuned: Source | None
    base: ModelConfig | None
    base_inside: bool
    weights: Weights
    both: bool = False
    """Keep both in memory; else opening the one lets the other go."""
    _opened: dict[str, PreTrainedModel | PeftModel] = field(default_factory=dict)

    @contextmanager
    def use(self, name: str) -> Iterator[PreTrainedModel | PeftModel]:
        """The model `base` or `tuned`, ready to be asked; no gradients inside the block."""
        inside = name == BASE and self.base_inside
        model = self._open("tuned" if inside else name)
        alone = model.disable_adapter() if inside and isinstance(model, PeftModel) else nullcontext()
        with torch.inference_mode(), computing_in(self.weights), alone:
            yield model

    def close(self) -> None:
        """Let go of what is open: a notebook's process goes on, and needs its card."""
        self._opened.clear()
        free_memory()

    def _open(self, name: str) -> PreTrainedModel | PeftModel:
        if name not in self._opened:
            if not self.both:
                self.close()
            if name == BASE:
                assert self.base is not None
                self._opened[name] = open_model(whole(self.base), self.weights)
            else:
                assert self.tuned is not None
                self._opened[name] = open_model(self.tuned, self.weights)
        return self._opened[name]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tuned model's own, else the base's."""
        if self.tuned is not None:
            return source_tokenizer(self.tuned)
        assert self.base is not None
        return load_tokenizer(self.base)


def whole(model: ModelConfig) -> Source:
    """A model that is nobody's run."""
    return Source(model_folder(model), model, None, None)


def computing_in(weights: Weights) -> AbstractContextManager[object]:
    """As in training: what is not float32 is computed under autocast."""
    dtype: torch.dtype = getattr(torch, weights.dtype)
    if dtype is torch.float32:
        return nullcontext()
    return torch.autocast(weights.device, dtype)


def open_model(source: Source, weights: Weights) -> PreTrainedModel | PeftModel:
    """Open a saved model where it is to be asked, with a head that needs no whole logits."""
    dtype: torch.dtype = getattr(torch, weights.dtype)
    if weights.bits is not None:
        model = _quantised(source, weights, dtype)
    elif source.adapter is None and source.trained is None:
        model = open_weights(model_config(source.model), source.model, dtype, None)
    else:
        model, _ = open_source(source)
        _cast(model, dtype)
    model = model.eval().requires_grad_(False)
    if weights.device == "cuda" and weights.bits is None:
        model = _on_card(model, source)
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    if has_plain_head(plain):
        add_fused_lm_head(plain, outputs=("log_probs", "is_top1"))
    return model


def has_plain_head(model: torch.nn.Module) -> bool:
    """Whether the head is one matrix; an adapter of its own on it is more than that."""
    if not isinstance(model, PreTrainedModel):
        return False
    head = model.get_output_embeddings()
    return head is not None and not isinstance(head, BaseTunerLayer)


def _quantised(source: Source, weights: Weights, dtype: torch.dtype) -> PreTrainedModel | PeftModel:
    if source.adapter is None:
        config = quantization(weights.quantised, dtype)
        return open_weights(model_config(source.model), source.model, dtype, config)
    try:
        model = open_saved(source.folder, source.model, weights.quantised, dtype, weights.device)
    except (RuntimeError, ValueError, SafetensorError) as error:
        raise _does_not_fit(source, str(error).strip().splitlines()[-1].strip()) from error
    for file in source.folder.glob("adapter_model.safetensors"):
        with safe_open(file, framework="pt") as opened:
            saved = set(opened.keys())
        expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
        missing, placeless = expected - saved, {name for name in saved - expected if "lora_" in name}
        if missing or placeless:
            what = f"{len(missing)} tensors are missing, {len(placeless)} have no place"
            raise _does_not_fit(source, f"{what}: {min(missing | placeless)}")
    return model


def _does_not_fit(source: Source, why: str) -> Exception:
    where = f"{source.folder} on {source.model.name_or_path}"
    fix = "Give the base that it was trained on: model.name_or_path=DIR."
    return refuse(where, f"the adapter does not fit this base: {why}", fix, subject="the adapter")


def _cast(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        own = isinstance(model, PeftModel) and any(part in name for part in OF_ADAPTER)
        if parameter.is_floating_point() and not own:
            parameter.data = parameter.data.to(dtype)


def _on_card(model: PreTrainedModel | PeftModel, source: Source) -> PreTrainedModel | PeftModel:
    needed = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.empty_cache()  # what torch has kept for later counts as taken
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        why = f"its weights take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the card are free"
        fix = "Use --bits 4, or launch.device=cpu."
        raise refuse(str(source.folder), why, fix, subject="the model")
    return model.cuda()
