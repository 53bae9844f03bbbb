"""The story of a run, told in every process that a launcher started: `python -m finetune.training.worker
RUN_DIR`.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from finetune.config.facts import load_facts
from finetune.config.rules import RunFacts
from finetune.config.saved import load_config
from finetune.config.schema import RunConfig
from finetune.distributed.world import current_world
from finetune.model.adapter import attach_adapter
from finetune.model.attention import choose_attention
from finetune.model.load import LoadedModel, checkpoint_class, free_memory, load_model, model_config
from finetune.model.tokenizer import load_tokenizer
from finetune.model.vocabulary import give_rows
from finetune.paths import RunDir
from finetune.progress import stage
from finetune.report.page import page_at_end
from finetune.report.record import Report, planned_forecast
from finetune.report.times import note_end, note_start
from finetune.training.arguments import sft_arguments
from finetune.training.build import build_trainer, record_training
from finetune.training.callbacks import StopSignals
from finetune.training.checkpoint import checkpoint_to_resume, step_to_resume
from finetune.training.process import run_process, strategy_environment
from finetune.training.proof import prove_saved_model
from finetune.training.rows import load_rows
from finetune.training.save import Saved, adapter_sums, save_model
from finetune.training.trainer import RunTrainer

log = logging.getLogger("finetune.training.worker")  # `__main__` in a process of our launcher


def run(run_dir: RunDir) -> int:
    """Train once, inside a world of processes; returns the exit code."""
    config, facts = load_config(run_dir.config), load_facts(run_dir.facts)
    report, main = Report(run_dir), current_world().is_main
    if main:
        planned = (planned_forecast(run_dir) or {}).get("memory")
        note_start(run_dir, behind=step_to_resume(run_dir), planned=planned)
    with StopSignals() as stop:
        saved = train(config, facts, run_dir, report, stop)
        free_memory()
        if saved is not None and saved.is_main:
            with stage("checking  the saved model"):
                prove_saved_model(report, saved, config, facts, run_dir)
        if main:
            note_end(run_dir)
            page_at_end(run_dir, log.info)
    return 128 + stop.agreed if saved is None else 0


def train(
    config: RunConfig, facts: RunFacts, run_dir: RunDir, report: Report, stop: StopSignals
) -> Saved | None:
    """Train and save; None when a signal ended the run, a checkpoint having been saved."""
    with strategy_environment(config, facts, run_dir):
        trainer, loaded, tokenizer = build(config, facts, run_dir, report, stop)
        start = adapter_sums(trainer.model, loaded.checkpoint_dtype)
        with stage_of_main("training ", "steps", told=False):
            trainer.go(checkpoint_to_resume(run_dir))
        record_training(report, trainer, stop.agreed)
        if stop.agreed:
            step, name = trainer.state.global_step, run_dir.path.name
            log.info("stopped   after step %d; go on with: checkpoint.resume=auto run_name=%s", step, name)
            return None
        trainer.take_up_best()
        with stage_of_main("saving    the model"):
            return save_model(trainer, loaded, start, tokenizer, config.data.thinking, run_dir)


def build(
    config: RunConfig, facts: RunFacts, run_dir: RunDir, report: Report, stop: StopSignals
) -> tuple[RunTrainer, LoadedModel, PreTrainedTokenizerFast]:
    """Everything that trains, ready to go."""
    tokenizer = load_tokenizer(config.model)
    rows = load_rows(run_dir)
    checkpoint = model_config(config.model)
    attention = choose_attention(checkpoint_class(checkpoint), checkpoint, config, facts)
    # before the model: ZeRO-3 shards while loading
    arguments = sft_arguments(config, facts, run_dir, attention)
    with stage_of_main("loading   the model"):
        loaded = load_model(checkpoint, config.model, config.adapter, facts, attention)
    give_rows(loaded.model, tokenizer, config.adapter, config.seed)
    model = attach_adapter(loaded.model, config.adapter, config.seed, config.model.revision)
    return build_trainer(arguments, model, tokenizer, rows, config, facts, report, stop), loaded, tokenizer


def stage_of_main(what: str, unit: str = "", *, told: bool = True) -> AbstractContextManager[Any]:
    """Rank 0's progress; the others go without."""
    return stage(what, unit, told=told) if current_world().is_main else nullcontext()


if __name__ == "__main__":
    run_process(RunDir(Path(sys.argv[1])), run)
