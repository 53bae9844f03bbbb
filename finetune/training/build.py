"""Puts the trainer of a run together with everything that watches it."""

from __future__ import annotations

import logging

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import SFTConfig

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig, Tracker
from finetune.config.strategy import TRAITS
from finetune.distributed.world import gather_objects
from finetune.planner.forecast import BETWEEN, compared, compared_line
from finetune.report.metrics import most_memory, read_metrics
from finetune.report.record import Report, planned_forecast, summary
from finetune.report.times import read_starts
from finetune.training.callbacks import Checkpoints, Counters, Record, StopSignals
from finetune.training.checkpoint import step_to_resume
from finetune.training.early import EarlyStopping
from finetune.training.proof import ProveBeforeStepOne
from finetune.training.rows import Rows
from finetune.training.samples import Samples
from finetune.training.saving import Saving
from finetune.training.step_table import StepTable
from finetune.training.time_left import TimeLeft
from finetune.training.tracking import RememberTracker
from finetune.training.trainer import RunTrainer

log = logging.getLogger(__name__)


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
    forecast = planned_forecast(report.run_dir)
    report.update(memory={"planned_bytes": forecast and forecast["memory"]})
    trainer = RunTrainer(
        model=model,
        args=arguments,
        train_dataset=rows.train,
        saving=Saving(report.run_dir, config.checkpoint.keep, arguments),
        eval_dataset=rows.eval,
        processing_class=tokenizer,
    )
    trainer.forecast = forecast
    for ours_instead in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(ours_instead)
    tracker, checkpoint = config.tracking.report_to, config.checkpoint
    if tracker is not Tracker.none:
        trainer.add_callback(RememberTracker(tracker, report.run_dir))
    if checkpoint.early_stopping_patience is not None:
        patience, threshold = checkpoint.early_stopping_patience, checkpoint.early_stopping_threshold
        trainer.early_stopping = EarlyStopping(patience, threshold)
        trainer.add_callback(trainer.early_stopping)
    samples, sharded = config.data.eval_samples, TRAITS[facts.strategy].shards_weights
    asked = rows.eval if samples and arguments.eval_strategy != "no" else None
    time_left = TimeLeft()
    for callback in (
        Counters(trainer),
        ProveBeforeStepOne(trainer, config, facts, report),
        *([Samples(trainer, asked, samples, report.run_dir, sharded=sharded)] if asked is not None else []),
        Record(report.run_dir, trainer),
        time_left,
        StepTable(trainer, time_left),
        Checkpoints(trainer, config.checkpoint, facts.stop_at, stop),
        stop,
    ):
        trainer.add_callback(callback)
    return trainer


def record_training(report: Report, trainer: RunTrainer, stopped_by: int) -> None:
    """Add what the training came to, and the signal that it was stopped by; every rank calls it, rank 0
    writes.
    """
    trainer.peaks.end(BETWEEN)
    memory = gather_objects(trainer.peaks.highest)
    phases = gather_objects(trainer.peaks.phases)
    longest = max(gather_objects(trainer.micro_batch_tokens))
    if trainer.args.process_index != 0:
        return
    steps, forecast, run_dir = trainer.state.global_step, trainer.forecast, report.run_dir
    told = summary(trainer.state.log_history, steps, read_starts(run_dir))
    speed = told["tokens_per_second"]
    step_seconds = trainer.seen_tokens / steps / speed if speed else None
    if step_to_resume(run_dir):  # else all was measured in this start
        memory = most_memory(memory, read_metrics(run_dir.metrics).memory)
    report.update(
        **told,
        memory={"planned_bytes": forecast and forecast["memory"], "measured_bytes": memory},
        forecast=compared(forecast, phases, longest, step_seconds, speed),
        highest_learning_rate=trainer.highest_rate,
        best=trainer.best,
        stopped_early=trainer.stopped_early,
        checkpoints={"saved": trainer.saving.saved, "waited_seconds": trainer.saving.waited_seconds},
    )
    if report.content["forecast"] is not None:
        log.info("forecast  %s", compared_line(report.content["forecast"]))
    report.update(status="failed")  # until the saved model is verified
    if stopped_by:
        report.update(status="interrupted", exit_code=128 + stopped_by)
    report.write()
