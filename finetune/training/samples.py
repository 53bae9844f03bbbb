"""What does the model answer to a few held-out rows, before the first step and at each evaluation?

The same rows each time, answered greedily by all processes together: no random number is drawn, so a run
takes the same course whether it is asked or not, and a sharded model finds its weights.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

from finetune.data.documents import Documents, Question, question_of, room_for
from finetune.model.answers import answer_all, greedy
from finetune.paths import RunDir, append_whole

if TYPE_CHECKING:
    from finetune.training.trainer import RunTrainer

log = logging.getLogger(__name__)

MOST_NEW_TOKENS = 128
"""Of an answer: sharded weights are gathered for each token."""
LONGEST_PROMPT = 1024
"""Tokens; rows that ask more are passed over: the answers are to cost little beside an evaluation."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A held-out row as it is asked."""

    question: Question
    prompt: str
    reference: str


class Samples(TrainerCallback):
    """Asks, and keeps what was answered in `samples.jsonl`, rank 0's part."""

    def __init__(
        self, trainer: RunTrainer, rows: Dataset, number: int, run_dir: RunDir, *, sharded: bool
    ) -> None:
        self.trainer = trainer
        self.tokenizer = tokenizer = trainer.processing_class
        self.run_dir = run_dir
        self.sharded = sharded
        positions = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
        self.asked, self.new_tokens = chosen(rows, number, tokenizer, positions)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._ask(0)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            self._ask(state.global_step)

    def _ask(self, step: int) -> None:
        if not self.asked:
            return
        trainer = self.trainer
        model, was_training = trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.model.training
        config = greedy(model, self.new_tokens)
        model.eval()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            said = answer_all(
                model,
                self.tokenizer,
                [one.question.prompt for one in self.asked],
                config,
                # a process that is done would leave the others waiting for its part of the weights
                synced=self.sharded and trainer.args.world_size > 1,
            )
        model.train(was_training)
        if trainer.args.process_index != 0:
            return
        lines = [
            {"step": step, "prompt": one.prompt, "reference": one.reference, "answer": answer.text}
            for one, answer in zip(self.asked, said, strict=True)
        ]
        try:
            content = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
            append_whole(self.run_dir.samples, content.encode("utf-8", errors="replace"))
        except OSError as error:
            log.warning("samples.jsonl cannot be written (%s): step %d is left out", error.strerror, step)


def chosen(
    rows: Dataset, number: int, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> tuple[list[Asked], int]:
    """Rows that ask something and leave room for an answer, spread evenly; and how long an answer may be."""
    documents = Documents(rows)
    room = min(LONGEST_PROMPT, (positions or LONGEST_PROMPT + MOST_NEW_TOKENS) - MOST_NEW_TOKENS)
    asked: list[Asked] = []
    for stretch in documents.stretches(number):  # of each the first that suits
        suiting = (question for row in stretch if (question := question_of(*documents[row])) is not None)
        question = next((one for one in suiting if len(one.prompt) <= room), None)
        if question is not None:
            reference = tokenizer.decode(question.reference, skip_special_tokens=True).strip()
            asked.append(Asked(question, tokenizer.decode(question.prompt), reference))
    return asked, min(room_for(one.question for one in asked), MOST_NEW_TOKENS)
