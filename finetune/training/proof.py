"""Proof before the first step that what runs is what was asked, and after saving that what was saved is
whole.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig
from finetune.config.strategy import TRAITS, Engine
from finetune.distributed.verify import Evidence, Running, inspect, verify_all_ranks
from finetune.errors import RunFailed
from finetune.model.reopen import check_loss, check_tensors
from finetune.paths import RunDir
from finetune.report.record import Report
from finetune.training.checkpoint import entry_of
from finetune.training.save import Saved
from finetune.training.trainer import RunTrainer

log = logging.getLogger(__name__)


class ProveBeforeStepOne(TrainerCallback):
    """Inspect the live objects of every rank when training begins; refuse on all ranks if one differs."""

    def __init__(self, trainer: RunTrainer, config: RunConfig, facts: RunFacts, report: Report) -> None:
        self.trainer = trainer
        self.config = config
        self.facts = facts
        self.report = report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, facts = self.trainer, self.facts
        fsdp = TRAITS[facts.strategy].engine is Engine.fsdp2
        asked = Running(
            num_processes=facts.num_processes,
            strategy=facts.strategy.value,
            reshard_after_forward=self.config.distributed.reshard_after_forward if fsdp else None,
            precision=facts.precision,
            master_dtype=facts.trained_dtype,
            global_batch_size=facts.batch.global_size,
            device=facts.device,
        )
        running, evidence = inspect(trainer.model_wrapped, trainer.optimizer, trainer.accelerator)
        found = Running(**running, global_batch_size=trainer.sampler.global_batch_size)
        trainer.count_steps_before(state.global_step)
        rows = tuple(trainer.rows_of_step(state.global_step)) if state.global_step < state.max_steps else ()
        ranks = verify_all_ranks(asked, found, Evidence(**evidence, rows=rows))
        self.report.update(
            strategy={"requested": asked.strategy, "actual": found.strategy},
            num_processes={"requested": asked.num_processes, "actual": found.num_processes},
            precision=found.precision,
            master_dtype=found.master_dtype,
            batch={
                "per_device": facts.batch.per_device,
                "accumulation": facts.batch.accumulation,
                "processes": facts.batch.processes,
                "global": facts.batch.global_size,
            },
            optimizer=evidence["optimizer"],
            trainable_parameters=evidence["trainable_parameters"],
            total_parameters=evidence["total_parameters"],
            wrapped_by=evidence["wrapped_by"],
        )
        if args.process_index == 0:
            for line in lines(found, ranks, facts, state.global_step, state.max_steps):
                log.info("%s", line)


def lines(
    found: Running, ranks: list[Evidence], facts: RunFacts, steps_made: int, max_steps: int
) -> list[str]:
    """What really runs, in the words of a person."""
    seen = ranks[0]
    held = ", ".join(f"{rank.weights_held:.0%}" for rank in ranks)
    resharding = "" if found.reshard_after_forward is not False else ", weights stay gathered after forward"
    processes = f"{found.num_processes} process{'es' * (found.num_processes > 1)}"
    share = seen.trainable_parameters / seen.total_parameters
    return [
        f"runs      {found.strategy} on {processes}, device {found.device}"
        f" ({seen.wrapped_by}{resharding}); weights held per process: {held}",
        f"precision {found.precision}; the optimizer updates {found.master_dtype} weights",
        f"optimizer {seen.optimizer}; trained: {seen.trainable_parameters:,} of {seen.total_parameters:,}"
        f" parameters ({share:.2%})",
        f"batch     {facts.batch.line}; {max_steps:,} steps",
        f"rows      step {steps_made + 1}: "
        + "; ".join(f"rank {i}: {_some(rank.rows)}" for i, rank in enumerate(ranks)),
    ]


def prove_saved_model(
    report: Report, saved: Saved, config: RunConfig, facts: RunFacts, run_dir: RunDir
) -> None:
    """Open the saved model afresh and check it: it becomes `model/` when every check has passed.

    The report lists every check, and one that fails fails the run.
    """
    learnt = report.content["highest_learning_rate"] > 0  # a warm-up's first step has a rate of 0
    live = saved.live
    folder = run_dir.unverified
    checks = check_tensors(folder, saved.written, live, trained=learnt)
    if all(check.passed for check in checks):
        checks += check_loss(folder, config.model, config.adapter, live, saved.dtype, facts)
    failed = [check for check in checks if not check.passed]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    report.update(
        model_files={str(path.relative_to(folder)): entry_of(path) for path in files},
        verified=[check.as_dict() for check in checks],
        status="failed" if failed else "completed",
        model_path=None if failed else str(run_dir.model),
    )
    folder.rename(run_dir.failed_model if failed else run_dir.model)
    report.write()
    for check in checks:
        log.info("%s %s (%s)", "checked  " if check.passed else "FAILED   ", check.name, check.detail)
    if failed:
        listed = "\n".join(f"  {check.name}: {check.detail}" for check in failed)
        raise RunFailed(
            f"the saved model did not pass its checks; it is kept in {run_dir.failed_model}\n"
            f"{listed}\n  The last checkpoint in {run_dir.checkpoints} is whole."
        )
    log.info("done      the model is saved and verified: %s", run_dir.model)


def _some(rows: tuple[int, ...]) -> str:
    shown = " ".join(map(str, rows[:6]))
    return f"{shown} ..." if len(rows) > 6 else shown
