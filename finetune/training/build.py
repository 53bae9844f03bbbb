"""Puts the trainer of a run together with everything that watches it."""

from __future__ import annotations

import resource
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import SFTConfig

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig, Tracker
from finetune.distributed.world import gather_objects
from finetune.report.record import Report, summary
from finetune.training.callbacks import Checkpoints, Counters, Record, StepLine, StopSignals
from finetune.training.early import EarlyStopping
from finetune.training.proof import ProveBeforeStepOne
from finetune.training.rows import Rows
from finetune.training.saving import Saving
from finetune.training.tracking import RememberTracker
from finetune.training.trainer import RunTrainer


def build_trainer(
    arguments: SFTConfig,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    config: RunConfig,
    facts: RunFacts,
    report: Report,
    stop: StopSignals,
) -> RunTrainer:
    """TRL's trainer on prepared rows, with records, checkpoints, signals and the proof before step 1."""
    trainer = RunTrainer(
        model=model,
        args=arguments,
        train_dataset=rows.train,
        saving=Saving(report.run_dir, config.checkpoint.keep, arguments),
        eval_dataset=rows.eval,
        processing_class=tokenizer,
    )
    for ours_instead in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(ours_instead)
    tracker, checkpoint = config.tracking.report_to, config.checkpoint
    if tracker is not Tracker.none:
        trainer.add_callback(RememberTracker(tracker, report.run_dir))
    if checkpoint.early_stopping_patience is not None:
        patience, threshold = checkpoint.early_stopping_patience, checkpoint.early_stopping_threshold
        trainer.early_stopping = EarlyStopping(patience, threshold)
        trainer.add_callback(trainer.early_stopping)
    for callback in (
        Counters(trainer),
        ProveBeforeStepOne(trainer, config, facts, report),
        Record(report.run_dir),
        StepLine(),
        Checkpoints(trainer, config.checkpoint, facts.stop_at, stop),
        stop,
    ):
        trainer.add_callback(callback)
    return trainer


def record_training(report: Report, trainer: RunTrainer, facts: RunFacts, stopped_by: int) -> None:
    """Add what the training came to, and the signal that it was stopped by; every rank calls it, rank 0
    writes.
    """
    memory = gather_objects(peak_memory_bytes(facts.device))
    if trainer.args.process_index != 0:
        return
    report.update(
        **summary(trainer.state.log_history, trainer.state.global_step),
        memory={"measured_bytes": memory},
        highest_learning_rate=trainer.highest_rate,
        best=trainer.best,
        stopped_early=trainer.stopped_early,
        checkpoints={"saved": trainer.saving.saved, "waited_seconds": trainer.saving.waited_seconds},
    )
    report.update(status="failed")  # until the saved model is verified
    if stopped_by:
        report.update(status="interrupted", exit_code=128 + stopped_by)
    report.write()


def peak_memory_bytes(device: str) -> dict[str, Any]:
    """The most memory this process held: on its card, or in RAM when it runs on the CPU."""
    if device == "cuda":
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
