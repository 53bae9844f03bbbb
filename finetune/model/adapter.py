"""Puts a low-rank adapter on the language model: never on other towers, on experts only if asked."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel

from finetune.config.schema import AdapterConfig, Method
from finetune.errors import refuse
from finetune.model.load import language_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Targets:
    """Where adapters go."""

    modules: list[str] | str
    """peft's `target_modules`: the last part of each name."""
    parameters: list[str]
    """peft's `target_parameters`: experts that are one stacked tensor rather than modules."""
    exclude: str | None
    """peft's `exclude_modules`: a pattern for modules of the same name outside the language model."""


def attach_adapter(
    model: PreTrainedModel, adapter: AdapterConfig, seed: int, revision: str | None = None
) -> PreTrainedModel | PeftModel:
    """Return the model with a trainable float32 adapter, the same on every process; unchanged for full fine-
    tuning.
    """
    if adapter.method is Method.full:
        return model
    torch.manual_seed(seed)
    if adapter.init_from is not None:
        attached = PeftModel.from_pretrained(model, adapter.init_from, is_trainable=True)
    else:
        attached = get_peft_model(model, lora_config(model, adapter), revision=revision)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if adapter.experts:
        trained = [(name, p.numel()) for name, p in attached.named_parameters() if p.requires_grad]
        of_experts = sum(count for name, count in trained if _of_experts(name.partition(".lora_")[0]))
        total = sum(count for _, count in trained)
        log.info(
            "adapter   %s of %s trained parameters in experts and router", f"{of_experts:,}", f"{total:,}"
        )
    return attached


def lora_config(model: PreTrainedModel, adapter: AdapterConfig) -> LoraConfig:
    targets = find_targets(model, adapter)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=adapter.r,
        lora_alpha=adapter.lora_alpha if adapter.lora_alpha is not None else 2 * adapter.r,
        lora_dropout=adapter.lora_dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        exclude_modules=targets.exclude,
        modules_to_save=list(adapter.modules_to_save) if adapter.modules_to_save else None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init_lora_weights=adapter.init_lora_weights,
    )


def find_targets(model: PreTrainedModel, adapter: AdapterConfig) -> Targets:
    """Turn `all-linear` into names that peft finds inside the language model alone."""
    inside = {id(module) for module in language_model(model).modules()}
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if adapter.target_modules == "all-linear":
        wanted = {
            name
            for name, module in linear.items()
            if id(module) in inside and module is not head and (adapter.experts or not _of_experts(name))
        }
        suffixes = sorted({name.rpartition(".")[2] for name in wanted})
    else:
        suffixes = (
            [adapter.target_modules]
            if isinstance(adapter.target_modules, str)
            else list(adapter.target_modules)
        )
        wanted = {
            name
            for name, module in linear.items()
            if id(module) in inside
            and any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
        }
    parameters = _expert_parameters(model, inside) if adapter.experts else []
    if not wanted and not parameters:
        known = sorted({name.rpartition(".")[2] for name, module in linear.items() if id(module) in inside})
        raise refuse(
            f"adapter.target_modules={adapter.target_modules}",
            "no linear layer of the language model has such a name.",
            f"This model has: {', '.join(known)}.",
            subject="the adapter",
        )
    outside = sorted(
        name
        for name in linear
        if name not in wanted and any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
    )
    exclude = "|".join(re.escape(name) for name in outside) if outside else None
    return Targets(suffixes, parameters, exclude)


def _of_experts(name: str) -> bool:
    """Whether a linear layer belongs to a mixture's experts or its router (`gate`, `router`)."""
    parts = name.split(".")
    return "experts" in parts or parts[-1] in ("gate", "router") or "router" in parts


def _expert_parameters(model: PreTrainedModel, inside: set[int]) -> list[str]:
    """Names of stacked expert weights and of the router's, e.g. `mlp.experts.gate_up_proj`."""
    found = set()
    for name, module in model.named_modules():
        if id(module) not in inside or isinstance(module, torch.nn.Linear):
            continue
        parts = name.split(".")
        if parts[-1] in ("experts", "gate", "router"):
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2:
                    found.add(".".join([*parts[-2:], parameter_name]))
    return sorted(found)
