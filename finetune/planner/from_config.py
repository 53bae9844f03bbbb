"""A config and what it comes to, as a job to plan."""

from __future__ import annotations

from finetune.config.rules import RunFacts
from finetune.config.schema import AdapterConfig, Method, RunConfig
from finetune.planner.job import Adapter, Job
from finetune.planner.optimizer import optimizer_named
from finetune.planner.shape import Shape
from finetune.planner.stack import Recompute, Stack

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}

QUANTISED_BYTES = {
    (4, False): 0.5 + 4 / 64,
    (4, True): 0.5 + 1 / 64 + 4 / (64 * 256),
    (8, False): 1.0,
    (8, True): 1.0,
}
"""(bits, double_quant) -> bytes of a weight: blocks of 64 with a float32 scale, or scales in 8 bits with a
float32 scale for 256 of them (QLoRA, arXiv:2305.14314, section 3)."""

LONGEST_ROW = 2048
"""Tokens of a row where neither data.max_length nor the model's positions say how long one may be."""


def job_of(config: RunConfig, facts: RunFacts, shape: Shape) -> Job:
    """What the run trains, at its largest: every row as long as it may be."""
    trainer, full = config.trainer, config.adapter.method is Method.full
    row = min(config.data.max_length or facts.positions or LONGEST_ROW, facts.positions or 10**9)
    evaluates = bool(config.data.eval) or config.data.eval_fraction > 0
    return Job(
        shape=shape,
        adapter=None if full else adapter_of(config.adapter, shape),
        trained_bytes=BYTES[facts.trained_dtype] if full else 4,
        frozen_bytes=BYTES[facts.frozen_dtype],
        quantised_bytes=QUANTISED_BYTES.get((config.adapter.bits, config.adapter.double_quant))
        if config.adapter.method is Method.qlora
        else None,
        compute_bytes=BYTES[facts.precision],
        optimizer=optimizer_named(trainer.optim or ""),
        tokens=row * facts.batch.per_device,
        row_tokens=row,
        eval_tokens=row * trainer.per_device_eval_batch_size if evaluates else 0,
        recompute=Recompute.full if trainer.activation_checkpointing else Recompute.none,
        accumulates=facts.batch.accumulation > 1,
        stack=Stack(
            eager_attention=config.model.attn_implementation == "eager",
            autocast=BYTES[facts.precision] < 4 and facts.trained_dtype != "bfloat16",
            fused_norm=bool(trainer.use_liger_kernel),
            triton=facts.device == "cuda",
        ),
    )


def adapter_of(adapter: AdapterConfig, shape: Shape) -> Adapter:
    """Which matrices carry it; `all-linear` leaves experts and router out unless they are asked for."""
    names = {linear.name for linear in shape.linears}
    wanted = adapter.target_modules
    named = names if wanted == "all-linear" else names & {*([wanted] if isinstance(wanted, str) else wanted)}
    embeddings = {"embed_tokens", "lm_head"} & {*(adapter.modules_to_save or ())}
    return Adapter(
        r=adapter.r,
        targets=frozenset(named),
        experts=adapter.experts,
        dropout=adapter.lora_dropout > 0,
        dora=adapter.use_dora,
        whole=shape.head_parameters * len(embeddings),
    )
