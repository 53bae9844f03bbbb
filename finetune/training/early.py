"""Early stopping: Hugging Face's callback, which here remembers its count and saves when it stops."""

from __future__ import annotations

import logging
from typing import Any

from transformers import EarlyStoppingCallback, TrainerState

log = logging.getLogger(__name__)


class EarlyStopping(EarlyStoppingCallback):
    """Upstream restores its count only together with the Trainer's control, and that one would stop a run
    again that a signal has stopped.
    """

    begun_at = 0

    @property
    def stopped(self) -> bool:
        """Whether there were as many evaluations without a new best as are allowed."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)

    def take_up(self, state: TrainerState) -> None:
        """Go on counting where a checkpoint's state has left off."""
        self.begun_at = state.global_step
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Nothing; upstream warns that nobody loads the best model, which the run does itself."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        if state.global_step == self.begun_at:
            return  # before the first step of this process: it has been counted, or there is nothing to count
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if self.stopped:
            control.should_save = True
            if args.process_index == 0:
                log.info("stopping  %d evaluations without a new best", self.early_stopping_patience_counter)
