"""What the Trainer does to save, to resume, and to keep the best: upstream's course, with our state in it."""

from __future__ import annotations

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from trl import SFTTrainer

from finetune.distributed.world import barrier
from finetune.errors import RunFailed
from finetune.training.checkpoint import cannot_write
from finetune.training.early import EarlyStopping
from finetune.training.live import live_state
from finetune.training.saving import Saving
from finetune.training.state_files import take_up_state, take_up_weights, write_numbers

log = logging.getLogger(__name__)

LAST_SAVE_SECONDS = 8.0
"""How long a failed run's last save may take to become whole: launchers end the ranks soon after."""


class SavingTrainer(SFTTrainer):
    """SFTTrainer whose checkpoints hold the state of every strategy alike (see `live`).

    Upstream writes a format for each strategy, pickled in part, which only the same strategy on the same
    number of processes can read, and goes on without a part that is missing.
    """

    def __init__(self, *args: Any, saving: Saving, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saving = saving
        self.early_stopping: EarlyStopping | None = None
        self._beside: Path | None = None
        self._best_saved: tuple[float | None, int | None] = None, None
        """The best evaluation whose checkpoint is there."""

    def go(self, checkpoint: str | None) -> None:
        """Train to the end, from a checkpoint if one is given; the last save is whole on the disk then."""
        try:
            self.train(resume_from_checkpoint=checkpoint)
        except BaseException:
            self.saving.finish_alone(LAST_SAVE_SECONDS)
            raise
        self.saving.wait()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Upstream writes the small files, we the state; it is seen when it is whole."""
        self.saving.wait()
        live = live_state(self)
        lacking = self.saving.lacking(live)
        if lacking and (self.control.should_training_stop or self.state.global_step >= self.state.max_steps):
            raise cannot_write(self.saving.checkpoints, OSError(lacking))
        if lacking:
            log.warning("no room for a checkpoint at step %d: %s", self.state.global_step, lacking)
            self.state.best_metric, self.state.best_global_step = self._best_saved
            return
        with self.saving.beside() as self._beside:
            super()._save_checkpoint(model, trial)
        self._beside = None
        self.saving.write(live, self.state.global_step, self.best)
        self._best_saved = self.state.best_metric, self.state.best_global_step

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Upstream would take the answer for the only reason to save."""
        asked = self.control.should_save
        return bool(super()._determine_best_metric(metrics, trial)) or asked

    def take_up_best(self) -> None:
        """Go back to the weights of the best checkpoint, where one is kept."""
        if self.best is None or self.best["step"] == self.state.global_step:
            return
        folder = self.saving.checkpoints / f"checkpoint-{self.best['step']}"
        if not folder.is_dir():
            raise RunFailed(
                f"the best evaluation was at step {self.best['step']}, and {folder} is not there.\n"
                "  The last checkpoint is: go on with checkpoint.resume=auto checkpoint.best=null."
            )
        take_up_weights(folder, live_state(self))
        log.info("best      %s %.4f at step %d: its weights are taken up", *self.best.values())

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation so far: `metric`, `value`, `step`."""
        if self.args.metric_for_best_model is None or self.state.best_global_step is None:
            return None
        metric, value = self.args.metric_for_best_model, self.state.best_metric
        return {"metric": metric, "value": value, "step": self.state.best_global_step}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: weights are part of the state, and `model/` is written by `save_model` of ours."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.process_index == 0:
            Path(output_dir).mkdir(exist_ok=True)
            write_numbers(Path(output_dir), live_state(self), self)
        barrier()

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: it is among the numbers."""

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the weights are taken up with the rest of the state, once the model is wrapped."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            take_up_state(Path(resume_from_checkpoint), live_state(self), self)
        return prepared

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, *rest: Any
    ) -> tuple[int, int]:
        """Upstream makes a step more when it resumes behind the last one: then no epoch is left here."""
        left_off = super()._init_training_state(max_steps, per_epoch, epochs, *rest)
        self._best_saved = self.state.best_metric, self.state.best_global_step
        if self.early_stopping is not None:
            self.early_stopping.take_up(self.state)
        return (epochs, 0) if self.state.global_step >= max_steps or self.stopped_early else left_off

    @property
    def stopped_early(self) -> bool:
        """Whether evaluations without a new best have ended the run."""
        return self.early_stopping is not None and self.early_stopping.stopped

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except UnpicklingError as error:
            why = str(error).strip().splitlines()[0]
            told = (
                f"the random numbers of {checkpoint} are no plain numbers, and nothing else is ever unpickled"
            )
            raise RunFailed(f"{told}: {why}") from error

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._beside or self.args.output_dir)
