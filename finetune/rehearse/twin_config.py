"""A run's config for its twin: what stays as it is, and what a rehearsal cuts short."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from finetune import hub
from finetune.config.machine import HardwareConfig
from finetune.config.schema import (
    CheckpointConfig,
    Device,
    HooksConfig,
    LaunchConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    Strategy,
    Thinking,
    TooLong,
    TrackingConfig,
)
from finetune.data.source import source_files
from finetune.errors import UserError
from finetune.model.tokenizer import load_tokenizer
from finetune.paths import embedded

STEPS = 12
"""More than are needed, so that a run of tiny steps is still under way when it is killed."""
CHECKPOINT_STEP = 3
KILLED_AFTER = 6
"""Steps behind the checkpoint are made twice, and have to come out the same."""
ROWS = 64
"""Of each source."""
LONGEST = 512
"""Tokens of a row."""
LEARNING_RATE = 1e-3
"""High enough for one step without its optimizer state to show in the loss of the next."""
RUN_NAME = "rehearsal"


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands for things that are not here."""

    tokenizer: PreTrainedTokenizerFast
    train: tuple[SourceConfig, ...]
    evaluation: tuple[SourceConfig, ...]
    notes: tuple[str, ...]


def standing_for(config: RunConfig) -> Standing:
    """The run's own tokenizer and rows, or small ones that ship with the package where those are out of
    reach.
    """
    tokenizer = _own_tokenizer(config.model)
    notes = []
    if tokenizer is None:
        notes.append(f"tokenizer: a stand-in, that of {config.model.name_or_path} is not here")
        tokenizer = load_tokenizer(ModelConfig(name_or_path=str(embedded("tiny"))))
    away = [source.path for source in config.data.train if _on_the_hub(source) and not hub.reachable()]
    train, evaluation = config.data.train, config.data.eval
    if away:
        notes.append(f"rows: stand-ins, {', '.join(away)} cannot be reached")
        train = [SourceConfig(path=str(embedded("behaviour.jsonl")))]
        evaluation = [SourceConfig(path=str(embedded("behaviour_eval.jsonl")))] if evaluation else []
    return Standing(tokenizer, _short(train), _short(evaluation), tuple(notes))


def twin_config(
    config: RunConfig, standing: Standing, strategy: Strategy, processes: int, twin: Path, runs: Path
) -> RunConfig:
    """The same run with the twin: its method, strategy, optimizer, schedule, masks and packing stay."""
    model, data, trainer = config.model, config.data, config.trainer
    flash = (model.attn_implementation or "").startswith("flash")
    length = min(data.max_length or LONGEST, LONGEST)
    evaluates = bool(standing.evaluation) or data.eval_fraction > 0
    return replace(
        config,
        model=ModelConfig(
            name_or_path=str(twin),
            cpu=True,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            attn_implementation=None if flash else model.attn_implementation,
            rope_scaling=model.rope_scaling,
        ),
        adapter=replace(config.adapter, init_from=None),
        data=replace(
            data,
            train=list(standing.train),
            eval=list(standing.evaluation),
            max_length=length,
            too_long=TooLong.truncate,
            max_dropped=1.0,
            thinking=Thinking.keep if standing.notes else data.thinking,
        ),
        trainer=replace(
            trainer,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=None,
            global_batch_size=2 * processes,
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            activation_checkpointing=trainer.activation_checkpointing in ("auto", True),
            use_liger_kernel=False,
            torch_compile=False,
            bf16=None,
            fp16=None,
            **({"eval_strategy": "steps", "eval_steps": CHECKPOINT_STEP} if evaluates else {}),
        ),
        distributed=replace(config.distributed, strategy=strategy),
        launch=LaunchConfig(num_processes=processes, device=Device.cpu),
        checkpoint=CheckpointConfig(
            every_minutes=None, every_steps=CHECKPOINT_STEP, keep=STEPS // CHECKPOINT_STEP
        ),
        hooks=HooksConfig(),
        tracking=TrackingConfig(),
        hardware=HardwareConfig(),
        output_dir=str(runs),
        run_name=RUN_NAME,
    )


def _own_tokenizer(model: ModelConfig) -> PreTrainedTokenizerFast | None:
    here = os.path.isdir(os.path.expanduser(model.name_or_path))
    if not here and not hub.cached(model.name_or_path, model.revision) and not hub.reachable():
        return None
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, UserError):
        return None


def _on_the_hub(source: SourceConfig) -> bool:
    """Whether its rows are a data set of the hub, as preparing them would find; a missing file is none."""
    if "://" in source.path:
        return source.path.startswith("hf://")
    try:
        return source_files(source) is None
    except UserError:
        return False  # preparing tells why


def _short(sources: list[SourceConfig]) -> tuple[SourceConfig, ...]:
    return tuple(
        replace(source, path=_in_full(source), limit=min(source.limit or ROWS, ROWS)) for source in sources
    )


def _in_full(source: SourceConfig) -> str:
    """The rehearsal's processes start in another folder than the person did, who meant a path from there."""
    if "://" in source.path or _on_the_hub(source):
        return source.path
    return os.path.abspath(os.path.expanduser(source.path))
