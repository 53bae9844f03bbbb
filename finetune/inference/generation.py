"""What does a model answer, and what did its base? Prompts in, answers out, from Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from finetune.errors import Problem, Refusal, refuse
from finetune.inference.answers import Answer, Answers
from finetune.inference.prompts import SUBJECT, Prompt, PromptEncoder, as_prompts
from finetune.inference.subject import BASE, TUNED, Subject, find_subject
from finetune.logs import without_noise
from finetune.model.fetch import fetch_model
from finetune.model.limits import model_limits
from finetune.model.tokenizer import load_tokenizer
from finetune.progress import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.inference.load import Models

Say = Callable[[str], None]


class Speaker:
    """The models of a RUN, open, with what they are asked through."""

    def __init__(
        self,
        subject: Subject,
        *,
        compare: bool = False,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        import torch

        from finetune.inference.load import Models

        self.names = (BASE, TUNED) if compare else subject.names[-1:]
        self.models: Models = Models(
            subject.tuned, subject.base, subject.base_inside, subject.weights, both=True
        )
        self.tokenizer: PreTrainedTokenizerBase = self.models.tokenizer()
        self.encoder = PromptEncoder(self.tokenizer, plain=_learnt_plain_text(subject))
        self.positions = model_limits(subject.speaks).positions
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.batch_size = subject.batch_size
        self.seed = subject.config.seed
        torch.manual_seed(self.seed)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; a refusal where they leave no room for an answer."""
        ids = self.encoder.encode(prompt)
        if self.positions is not None and len(ids) >= self.positions:
            why = f"it has {len(ids):,} tokens, and the model has {self.positions:,} positions"
            raise refuse(prompt.place, why, "Shorten it.", subject=SUBJECT)
        return ids

    def answer(self, name: str, prompts: list[list[int]], streamer: Any = None) -> list[Any]:
        """Answers (`Said`) of one model to a batch of encoded prompts."""
        from finetune.model.answers import answer_all, sampling

        with self.models.use(name) as model:
            config = sampling(model, self.temperature, self.max_new_tokens)
            if self.positions is not None:
                config.max_new_tokens = min(
                    config.max_new_tokens, self.positions - max(len(ids) for ids in prompts)
                )
            return answer_all(model, self.tokenizer, prompts, config, streamer)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
        """For each prompt in turn the answers of every model that is asked, a batch at a time."""
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            encoded = [self.encode(prompt) for prompt in batch]
            said = [self.answer(name, encoded) for name in self.names]
            for place, prompt in enumerate(batch):
                found = zip(self.names, (of_model[place] for of_model in said), strict=True)
                yield [Answer(name, prompt.text, one.text, one.tokens, one.finished) for name, one in found]


def generate(
    run: str | os.PathLike[str] | None,
    prompt: str | Sequence[dict[str, Any]] | Sequence[str | Sequence[dict[str, Any]]],
    *overrides: str,
    compare: bool = False,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    bits: int | None = None,
    say: Say = tell,
) -> Answers:
    """Answer a prompt or several, with a run, a checkpoint, an adapter or a model.

    Args:
        run: a folder, or a `Run`; null: the overrides name a model.
        prompt: a text, a conversation (`[{"role": ..., "content": ...}]`), or a list of either.
        compare: the base answers too, before the tuned model.
        temperature: 0 is the likeliest token each time; null: as the model was saved.
        max_new_tokens: null: as the model was saved, or 512.
        bits: 4 or 8: the base is quantised while it is loaded.

    Raises:
        Refusal: the model, a prompt or the words must be changed first.
    """
    prompts = as_prompts(prompt)
    with without_noise():
        speaker = open_speaker(
            run,
            overrides,
            compare=compare,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            bits=bits,
            say=say,
        )
        try:
            return Answers(answer for answers in speaker.answers(prompts) for answer in answers)
        finally:
            speaker.models.close()


def open_speaker(
    run: str | os.PathLike[str] | None,
    overrides: Sequence[str],
    *,
    compare: bool,
    temperature: float | None,
    max_new_tokens: int | None,
    bits: int | None,
    say: Say,
) -> Speaker:
    """Check everything, say what is asked, and open the models."""
    problems: list[Problem] = []
    if temperature is not None and not 0 <= temperature < float("inf"):
        problems.append(Problem(f"--temperature {temperature:g}", "expected 0 or more"))
    if max_new_tokens is not None and max_new_tokens < 1:
        problems.append(Problem(f"--max-new-tokens {max_new_tokens}", "expected 1 or more"))
    try:
        subject = find_subject(run, overrides, bits=bits, processes=False)
    except Refusal as refusal:
        raise Refusal([*problems, *refusal.problems], refusal.subject) from None
    if compare and len(subject.names) < 2:
        why = next((line for line in subject.lines if line.startswith("base ")), "there is one model alone")
        problems.append(Problem("--compare", " ".join(why.split())))
    if problems:
        raise Refusal(problems, subject.word or subject.composed.subject)
    for line in (*subject.composed.notes, *subject.lines):
        say(line)
    wanted = [subject.tuned.model] if subject.tuned is not None else []
    wanted += [subject.base] if subject.base is not None and (compare or not wanted) else []
    for model in {model.name_or_path: model for model in wanted}.values():
        fetch_model(model)
    return Speaker(subject, compare=compare, temperature=temperature, max_new_tokens=max_new_tokens)


def _learnt_plain_text(subject: Subject) -> bool:
    """A run on texts without roles is asked without the chat template that its tokenizer may have."""
    run = subject.run
    if run is None or not run.data.exists():
        return not load_tokenizer(subject.speaks).chat_template
    said = json.loads(run.data.read_text(encoding="utf-8")).get("train") or {}
    return said.get("format") in ("text", "tokenized")
