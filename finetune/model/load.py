"""Loads the model that is trained: the checkpoint's own class, one dtype rule, towers frozen, 4-bit where
asked.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)

from finetune.config.rules import RunFacts
from finetune.config.schema import AdapterConfig, Method, ModelConfig
from finetune.errors import refuse
from finetune.model.attention import Attention

log = logging.getLogger(__name__)

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for training, and what the checkpoint was."""

    model: PreTrainedModel
    checkpoint_dtype: torch.dtype


def load_model(
    config: PretrainedConfig,
    model: ModelConfig,
    adapter: AdapterConfig,
    facts: RunFacts,
    attention: Attention,
) -> LoadedModel:
    """Load the weights on the CPU (or, quantised, on this process's own card), trained weights in float32
    unless set.
    """
    full = adapter.method is Method.full
    dtype = getattr(torch, facts.trained_dtype if full else facts.frozen_dtype)
    stored = checkpoint_dtype(config)
    quantised = None if full else quantization(adapter, COMPUTE_DTYPE[facts.precision])
    loaded = open_weights(config, model, dtype, quantised, attn_implementation=attention.implementation)
    loaded.config.use_cache = False
    if not full:
        loaded.requires_grad_(False)
    _freeze_towers(loaded)
    _name_layers(loaded)
    return LoadedModel(loaded, stored)


def open_weights(
    config: PretrainedConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    quantised: BitsAndBytesConfig | None,
    **options: Any,
) -> PreTrainedModel:
    """The weights that `model` names, on the CPU; transformers puts quantised ones on this process's card.

    A `device_map` of ours would be refused under ZeRO-3.
    """
    if quantised is not None:
        options["quantization_config"] = quantised
    else:
        options |= _stored_quantised(config, model)
    if model.gguf_file is not None:
        options["gguf_file"] = model.gguf_file
    loaded: PreTrainedModel = checkpoint_class(config).from_pretrained(
        model.name_or_path,
        config=config,
        revision=model.revision or "main",
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        **options,
    )
    if quantised is not None:
        keep_layout(loaded)
    return loaded


def keep_layout(model: torch.nn.Module) -> None:
    """Keep 4-bit weights as they are: on CPUs with avx512_bf16 bitsandbytes packs them anew, for good, at the
    first input in evaluation mode that needs no gradient
    (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1804). Training that goes on behind it gets
    no gradient through them, what is computed in float32 comes out as in bfloat16, and layers whose outputs
    are no multiple of 32 fail.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def model_config(model: ModelConfig) -> PretrainedConfig:
    """The checkpoint's config with this run's `rope_scaling`, if any."""
    config = AutoConfig.from_pretrained(
        model.name_or_path,
        revision=model.revision or "main",
        trust_remote_code=model.trust_remote_code,
        **({"gguf_file": model.gguf_file} if model.gguf_file else {}),
    )
    if model.rope_scaling is not None:
        text = config.get_text_config()
        text.rope_parameters = {**(text.rope_parameters or {}), **model.rope_scaling}
        original = model.rope_scaling.get("original_max_position_embeddings", text.max_position_embeddings)
        text.max_position_embeddings = int(original * model.rope_scaling["factor"])
    return config


def checkpoint_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that the checkpoint names: a multimodal one keeps its towers, so that the export is whole.

    `AutoModelForCausalLM` for code that ships with the checkpoint.
    """
    for name in config.architectures or []:
        candidate = getattr(transformers, name, None)
        if candidate is not None and candidate.can_generate():
            return candidate
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM._model_mapping[type(config)]
    return AutoModelForCausalLM


def quantization(adapter: AdapterConfig, compute: torch.dtype) -> BitsAndBytesConfig | None:
    """4-bit or 8-bit weights for qlora, else None.

    4-bit weights are stored in the compute dtype, so that FSDP2 can shard them: in the default uint8
    accelerate leaves them out of the sharding, and every process holds the whole model.
    """
    if adapter.method is not Method.qlora:
        return None
    if adapter.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=adapter.quant_type,
        bnb_4bit_use_double_quant=adapter.double_quant,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=compute,
    )


def _stored_quantised(config: PretrainedConfig, model: ModelConfig) -> dict[str, Any]:
    """A checkpoint that is stored quantised is unpacked while loading, where transformers can train the
    result.
    """
    stored = config.to_dict().get("quantization_config")
    if stored is None:
        return {}
    if stored["quant_method"] == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise refuse(
        f"model.name_or_path={model.name_or_path}",
        f"its weights are stored quantised ({stored['quant_method']}), and cannot be trained so.",
        "Use the checkpoint's unquantised sister; adapter=qlora quantises while loading.",
        subject="the model",
    )


def language_model(model: PreTrainedModel) -> torch.nn.Module:
    """The text part of a multimodal model; the model itself where there is no other part."""
    return model.get_decoder() if model.config.get_text_config() is not model.config else model


def _freeze_towers(model: PreTrainedModel) -> None:
    text = language_model(model)
    if text is model:
        return
    head = model.get_output_embeddings()
    kept = {id(parameter) for part in (text, head) if part is not None for parameter in part.parameters()}
    frozen = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    for parameter in frozen:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in frozen)
    log.info(
        "text-only run of a multimodal checkpoint: %s parameters of other towers are frozen", f"{count:,}"
    )


def _name_layers(model: PreTrainedModel) -> None:
    """Leave out names of layers that the model does not have: accelerate refuses to shard it for them.

    transformers names the layers of every part that a tower's family can have, e.g. a text part of SigLIP.
    """
    there = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in model._no_split_modules or () if name in there]


def checkpoint_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype of the stored weights, as config.json says it; float32 where it is silent."""
    stored = config.dtype or config.get_text_config().dtype
    return stored if isinstance(stored, torch.dtype) else getattr(torch, stored or "float32")


def free_memory() -> None:
    """Give back what is held no longer: models and those who train them know each other in circles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
