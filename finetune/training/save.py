"""Saves a finished run into `model/` and remembers what the saved model must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from transformers import PreTrainedTokenizerBase

from finetune.config.schema import Thinking
from finetune.model.export import Written, checksum, save_adapter, save_full, save_words
from finetune.model.load import LoadedModel
from finetune.model.reopen import LiveModel
from finetune.model.tokenizer import turn_end, unthinking
from finetune.paths import RunDir
from finetune.training.trainer import RunTrainer, fixed_batch


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written, and what the live model was."""

    written: Written
    live: LiveModel
    dtype: torch.dtype
    is_main: bool


def save_model(
    trainer: RunTrainer,
    loaded: LoadedModel,
    start_sums: dict[str, float],
    tokenizer: PreTrainedTokenizerBase,
    thinking: Thinking,
    run_dir: RunDir,
) -> Saved:
    """Write weights, tokenizer and generation config beside `model/`, which appears when they are verified.

    All ranks call it: sharded weights are gathered by all of them, rank 0 writes.
    """
    is_main = trainer.args.process_index == 0
    end = turn_end(tokenizer)
    live = _live_model(trainer, start_sums, end)
    if is_main:
        run_dir.unverified.mkdir()
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    save = save_adapter if isinstance(model, PeftModel) else save_full
    written = save(model, run_dir.unverified, loaded.checkpoint_dtype, is_main)
    if thinking is Thinking.off:
        tokenizer.chat_template = unthinking(tokenizer.chat_template)
    if is_main:
        save_words(loaded.model, tokenizer, run_dir.unverified, end)
    if dist.is_initialized():
        dist.barrier()
    return Saved(written, live, loaded.checkpoint_dtype, is_main)


def adapter_sums(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, float]:
    """Checksums of an adapter's tensors as they would be saved now; empty for a model without one."""
    if not isinstance(model, PeftModel):
        return {}
    return {name: checksum(tensor.to(dtype)) for name, tensor in get_peft_model_state_dict(model).items()}


def _live_model(trainer: RunTrainer, start_sums: dict[str, float], end: int) -> LiveModel:
    """The live model's loss on a fixed batch; every rank runs the same one, as sharded models need."""
    batch = fixed_batch(trainer.train_dataset, trainer.processing_class.pad_token_id)
    trainer.model.eval()
    summed, count = trainer.summed_loss(batch)
    return LiveModel(loss=summed / count, batch=batch, start_sums=start_sums, turn_end=end)
