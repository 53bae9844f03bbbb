"""Rules on the model and its adapter: sizes, lengths, packing, quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.config.case import DEEPSPEED, FSDP, Case
from finetune.config.model_folder import nameless_problem, stored_config
from finetune.config.packages import bitsandbytes_problem
from finetune.config.precision import Precision
from finetune.config.schema import Method, ModelConfig, Strategy
from finetune.config.values import written

LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora", "use_dora")
ADAPTER_KEYS = (*LORA_KEYS, "init_lora_weights", "experts", "init_from")
QLORA_KEYS = ("bits", "quant_type", "double_quant")
LINEAR_ATTENTION = ("qwen3_next", "qwen3_5")
"""Families that mix linear attention in; their layers are also listed in `layer_types`."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rules need of a model; null: not known before it is fetched."""

    model_type: str | None
    positions: int | None
    linear_attention: bool
    num_experts: int | None
    tied: bool | None
    """Whether embedding and head are one matrix."""


def model_facts(model: ModelConfig) -> ModelFacts:
    """From config.json of a local folder, else from `model.shape`."""
    shape = model.shape
    stored = stored_config(model.name_or_path)
    text = stored.get("text_config", stored)
    model_type = text.get("model_type") or stored.get("model_type") or shape.model_type
    layers = text.get("layer_types") or shape.extra.get("layer_types") or []
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
    return ModelFacts(
        model_type=model_type,
        positions=text.get("max_position_embeddings") or shape.max_position_embeddings,
        linear_attention="linear_attention" in layers or (model_type or "").startswith(LINEAR_ATTENTION),
        num_experts=experts if stored else shape.num_experts,
        tied=text.get("tie_word_embeddings", stored.get("tie_word_embeddings", shape.tie_word_embeddings)),
    )


def check_model(case: Case, facts: ModelFacts) -> None:
    """The model's files, its length limit and its attention."""
    model = case.config.model
    if model.name_or_path.startswith(("/", "~")) and not Path(model.name_or_path).exists():
        case.lack(f"model.name_or_path={model.name_or_path}", "there is no such folder")
    case.problems += filter(None, [nameless_problem(model)])
    template = model.chat_template
    if template is not None and "{" not in template and not Path(template).is_file():
        why = "there is no such file, and it is no template"
        case.refuse(
            f"model.chat_template={written(template)}", why, "Give a Jinja file, or the template itself."
        )
    if (model.attn_implementation or "").startswith("flash_attention") and case.device == "cpu":
        why = "flash attention runs on GPUs only"
        case.refuse(
            f"model.attn_implementation={model.attn_implementation}", why, "Use sdpa, or leave the key out."
        )
    check_lengths(case, facts)
    if case.config.trainer.router_aux_loss_coef is not None and facts.model_type and not facts.num_experts:
        why = f"{facts.model_type} has no experts, so there is no router to balance"
        case.refuse(f"trainer.router_aux_loss_coef={case.config.trainer.router_aux_loss_coef:g}", why)


def check_lengths(case: Case, facts: ModelFacts) -> None:
    """How long a row may be, and whether rows may share one."""
    _check_length(case, facts)
    if case.config.data.packing and facts.linear_attention:
        case.refuse(
            "data.packing=true",
            f"{facts.model_type or 'this model'} has layers of linear attention, which carry their state "
            "from one packed row into the next",
            "Use data.packing=false.",
        )


def effective_positions(model: ModelConfig, facts: ModelFacts) -> int | None:
    """Positions after `rope_scaling`."""
    scaling = model.rope_scaling
    if scaling is None or not isinstance(scaling.get("factor"), int | float):
        return facts.positions
    original = scaling.get("original_max_position_embeddings", facts.positions)
    return None if original is None else int(original * scaling["factor"])


def check_adapter(case: Case, facts: ModelFacts, precision: Precision) -> None:
    """The adapter's keys, its targets, and quantisation."""
    adapter = case.config.adapter
    idle = ADAPTER_KEYS if adapter.method is Method.full else ()
    idle = idle if adapter.method is Method.qlora else (*idle, *QLORA_KEYS)
    for key in (k for k in idle if case.on_command_line(f"adapter.{k}")):
        fix = f"Use adapter={'qlora' if key in QLORA_KEYS else 'lora'}, or leave the key out."
        value = written(getattr(adapter, key))
        case.refuse(f"adapter.{key}={value}", f"it has no effect with adapter={adapter.method.value}", fix)
    if not case.trains_adapter:
        return
    named = adapter.target_modules if isinstance(adapter.target_modules, list) else [adapter.target_modules]
    if "lm_head" in named:
        case.refuse(
            f"adapter.target_modules={written(adapter.target_modules)}",
            "the loss is computed from lm_head's own weights, so an adapter on it would never be trained",
            "Leave lm_head out, or train it in full: adapter.modules_to_save=[lm_head].",
        )
    if adapter.experts and facts.model_type and not facts.num_experts:
        case.refuse("adapter.experts=true", f"{facts.model_type} has no experts", "Leave the key out.")
    if adapter.init_from is not None and not (Path(adapter.init_from) / "adapter_config.json").is_file():
        why = "there is no adapter (adapter_config.json) in this folder"
        case.lack(f"adapter.init_from={adapter.init_from}", why)
    if adapter.modules_to_save and facts.tied and case.strategy in FSDP:
        kept = written(adapter.modules_to_save)
        case.refuse(
            f"adapter.modules_to_save={kept} with distributed={case.strategy.value}",
            "embedding and head of this model are one matrix, and torch's FSDP2 cannot hold a trained copy "
            "of one beside the other",
            "Use distributed=ddp, zero2 or zero3.",
        )
    kwargs = case.config.trainer.activation_checkpointing_kwargs or {}
    if kwargs.get("use_reentrant") is True and case.strategy is Strategy.ddp:
        case.refuse(
            "trainer.activation_checkpointing_kwargs.use_reentrant=true",
            "with ddp and an adapter, re-entrant recomputation marks parameters ready twice and the first "
            "backward pass fails",
            "Leave it out (false).",
        )
    if adapter.method is Method.qlora:
        _check_quantisation(case, precision)


def _check_length(case: Case, facts: ModelFacts) -> None:
    model, length = case.config.model, case.config.data.max_length
    if model.rope_scaling is not None and not {"rope_type", "factor"} <= model.rope_scaling.keys():
        why = "rope_type and factor are both needed"
        fix = "For example model.rope_scaling='{rope_type: yarn, factor: 4.0}'."
        case.refuse("model.rope_scaling", why, fix)
        return
    positions = effective_positions(model, facts)
    if length is None or positions is None or length <= positions:
        return
    scaled = f" with rope_scaling factor {model.rope_scaling['factor']:g}" if model.rope_scaling else ""
    factor = -(-length // (facts.positions or length))
    case.refuse(
        f"data.max_length={length}",
        f"the model has {positions} positions{scaled}, and runs past them without an error",
        f"Use data.max_length={positions} or less, or "
        f"model.rope_scaling='{{rope_type: yarn, factor: {factor}.0}}'.",
    )


def _check_quantisation(case: Case, precision: Precision) -> None:
    problem = bitsandbytes_problem()
    if problem is not None:
        case.lack(
            "adapter=qlora", problem, "Install it: pip install 'bitsandbytes>=0.46.1'; or use adapter=lora."
        )
    if case.device == "cpu":
        case.notes.append("adapter=qlora on CPU: 4-bit weights are unpacked for every step, so it is slow")
    if case.strategy not in FSDP:
        return
    compute = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision.compute]
    if case.config.model.dtype not in (None, compute):
        case.refuse(
            f"model.dtype={case.config.model.dtype} with distributed={case.strategy.value} and adapter=qlora",
            f"fsdp casts what it gathers to the compute precision ({compute}); 4-bit weights are stored in "
            "that dtype so that no cast touches them",
            f"Leave model.dtype out, or use {compute}.",
        )
    if case.config.adapter.bits == 8:
        case.refuse(
            f"adapter.bits=8 with distributed={case.strategy.value}",
            "fsdp can only shard floating-point weights, and 8-bit ones are integers",
            "Use adapter.bits=4, or distributed=ddp or zero2.",
        )


def check_masters(case: Case, precision: Precision) -> None:
    """DeepSpeed always keeps float32 master weights: it cannot train without them."""
    if case.strategy in DEEPSPEED and precision.trained_dtype != "float32":
        case.refuse(
            f"model.dtype={precision.trained_dtype} with distributed={case.strategy.value}",
            "DeepSpeed keeps a float32 copy of trained weights all the same",
            "Use single, ddp or fsdp, or leave model.dtype out.",
        )
