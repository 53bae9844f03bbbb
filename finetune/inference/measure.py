"""One process's part of an evaluation: how each of its rows is predicted, and what is answered to some.

Nothing is exchanged between processes: each writes the figures of its rows into one file of all rows, and
its answers into a file of its own. So the work can be shared out in any way, and memory does not grow with
the rows, but for a few bytes of each row's place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.data.documents import Documents, Question, question_of
from finetune.data.encode import NOT_LEARNT
from finetune.data.windows import FILL, WindowSampler
from finetune.inference.harness import run_tasks
from finetune.inference.job import Job, answers_file, figures_file, tasks_file
from finetune.inference.load import Models, has_plain_head
from finetune.model.answers import Said, answer_all, greedy
from finetune.progress import stage

POSITIONS_AT_ONCE = 256
"""Of a head that gives whole logits, so many positions are looked at in one go."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process does for one model."""

    job: Job
    name: str
    """The model's: base or tuned."""
    folder: Path
    rank: int
    world_size: int

    def predict(self, model: PreTrainedModel | PeftModel, documents: Documents) -> None:
        """Write the figures of this process's rows."""
        figures = np.lib.format.open_memmap(figures_file(self.folder, self.name), mode="r+")
        for batch in self._told(documents.lengths, "rows      predicted"):
            figures[batch] = score(model, [documents[row] for row in batch], pad=0)
        figures.flush()

    def answer(
        self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, documents: Documents
    ) -> None:
        """Write what is answered to this process's questions."""
        rows = np.array(self.job.questions, np.int64)
        if not len(rows):
            return
        config = greedy(model, self.job.max_new_tokens)
        with answers_file(self.folder, self.name, self.rank).open("w", encoding="utf-8") as file:
            for batch in self._told(documents.lengths[rows], "answers   given"):
                asked: list[Question] = [_question(documents, int(rows[at])) for at in batch]
                said = answer_all(model, tokenizer, [question.prompt for question in asked], config)
                for at, question, one in zip(batch, asked, said, strict=True):
                    file.write(json.dumps(_line(int(rows[at]), question, one, tokenizer)) + "\n")

    def measure(
        self, models: Models, tokenizer: PreTrainedTokenizerBase, documents: Documents | None
    ) -> None:
        """All of it; nobody holds the model any more afterwards, when the next one is opened."""
        with models.use(self.name) as model:
            if documents is not None:
                self.predict(model, documents)
                self.answer(model, tokenizer, documents)
            if self.job.tasks and self.rank == 0:  # the harness shares nothing out
                said = run_tasks(model, tokenizer, self.job.tasks, self.job.batch_size)
                tasks_file(self.folder, self.name).write_text(json.dumps(said), encoding="utf-8")

    def _told(self, lengths: np.ndarray, what: str) -> Iterator[list[int]]:
        """The batches of this process; the first one says how far it is with its share."""
        batches = list(self._batches(lengths))
        if self.rank > 0:
            yield from batches
            return
        share = f", process 0 of {self.world_size}" if self.world_size > 1 else ""
        with stage(f"{what} by {self.name}{share}", "rows") as going:
            going.of(sum(map(len, batches)))
            for batch in batches:
                yield batch
                going.advance(len(batch))

    def _batches(self, lengths: np.ndarray) -> Iterator[list[int]]:
        """Rows as training deals them out: those of like length share a batch."""
        sampler = WindowSampler(
            lengths,
            per_device=self.job.batch_size,
            accumulation=16,  # a window wide enough to find rows of like length in
            rank=self.rank,
            world_size=self.world_size,
            seed=0,
            shuffle=False,
        )
        for batch in sampler:
            rows = [row for row in batch if row != FILL]
            if rows:
                yield rows


def measure(job: Job, folder: Path, rank: int, world_size: int) -> None:
    """Do this process's part and write what comes of it into the folder."""
    models = Models(job.find_tuned(), job.base_model, job.base_inside, job.weights)
    tokenizer = models.tokenizer()
    documents = Documents.in_file(Path(job.rows)) if job.rows is not None else None
    try:
        for name in job.names:
            Part(job, name, folder, rank, world_size).measure(models, tokenizer, documents)
    finally:
        models.close()


def score(
    model: PreTrainedModel | PeftModel, rows: list[tuple[list[int], list[int]]], pad: int
) -> np.ndarray:
    """The figures of a batch of rows (ids, labels): a line each. A row's first token is never predicted."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows], device=model.device)
    labels = torch.tensor(
        [labels + [NOT_LEARNT] * (longest - len(labels)) for _, labels in rows], device=model.device
    )
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows], device=model.device)
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    if has_plain_head(plain):
        said = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, fused_lm_head=True)
        nll, right, learnt = -said.log_probs, said.is_top1, said.label_mask
    else:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        learnt = labels[:, 1:] != NOT_LEARNT
        nll, right = _of_logits(logits, labels[:, 1:], learnt)
    columns = (nll.double().sum(1), learnt.sum(1).double(), (right.bool() & learnt).sum(1).double())
    return torch.stack(columns, dim=1).cpu().numpy()


def _of_logits(
    logits: torch.Tensor, labels: torch.Tensor, learnt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood, and whether the label is the likeliest token; 0 where nothing is learnt."""
    nll = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    right = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    for start in range(0, labels.shape[1], POSITIONS_AT_ONCE):
        part = slice(start, start + POSITIONS_AT_ONCE)
        wide, wanted = logits[:, part].float(), labels[:, part]
        entropy = torch.nn.functional.cross_entropy(
            wide.flatten(0, 1), wanted.flatten(), ignore_index=NOT_LEARNT, reduction="none"
        )
        nll[:, part] = entropy.view_as(wanted)
        right[:, part] = (wide.argmax(-1) == wanted) & learnt[:, part]
    return nll, right


def _question(documents: Documents, row: int) -> Question:
    question = question_of(*documents[row])
    assert question is not None, "the parent asks only rows that hold a question"
    return question


def _line(row: int, question: Question, said: Said, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "row": row,
        "prompt": tokenizer.decode(question.prompt),
        "reference": tokenizer.decode(question.reference, skip_special_tokens=True).strip(),
        "answer": said.text,
        "tokens": said.tokens,
        "finished": said.finished,
    }
