"""What do a model and its base answer, and how well do they predict held-out rows, from Python?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.inference import evaluation, generation
from finetune.inference.evaluation import SAMPLES, Evaluation
from finetune.inference.generation import Answer
from finetune.report.cells import table
from finetune.report.evaluation_text import printable, side_by_side

if TYPE_CHECKING:
    import pandas

COLUMNS = 80
Place = str | os.PathLike[str]
"""A folder of a run, a checkpoint, an adapter or a model; or a `Run`."""


class Answers(list[Answer]):
    """Answers in the order of the prompts; of each prompt the base's before the tuned model's."""

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each prompt, and a column for each model's answer."""
        import pandas

        return pandas.DataFrame(
            [{"prompt": own[0].prompt, **{one.model: one.text for one in own}} for own in self._by_prompt()]
        )

    def __repr__(self) -> str:
        lines: list[str] = []
        for own in self._by_prompt():
            lines += ["", f"> {printable(own[0].prompt)}"]
            if len(own) == 1:
                lines.append(printable(_told(own[0])))
            else:
                lines += side_by_side({one.model: printable(_told(one)) for one in own}, COLUMNS)
        return "\n".join(lines[1:])

    def _repr_html_(self) -> str:
        rows = [[own[0].prompt, *map(_told, own)] for own in self._by_prompt()]
        return table(["prompt", *dict.fromkeys(one.model for one in self)], rows)

    def _by_prompt(self) -> list[list[Answer]]:
        models = len({one.model for one in self})
        return [self[start : start + models] for start in range(0, len(self), models or 1)]


def evaluate(
    run: Place | None = None,
    *overrides: str,
    samples: int = SAMPLES,
    metrics: Sequence[str] = (),
    tasks: Sequence[str] = (),
    bits: int | None = None,
    max_new_tokens: int | None = None,
    say: Callable[[str], None] = print,
) -> Evaluation:
    """Measure a run, a checkpoint, an adapter or a model, and its base, on the rows that it did not learn.

    Args:
        run: null: the overrides name a model.
        samples: rows that are answered by generation, spread evenly over the rows.
        metrics: further ones, by name (`final_number`) or as `module:function`.
        tasks: of lm-evaluation-harness, by name or as a YAML file.
        bits: 4 or 8: the base is quantised while it is loaded.
        max_new_tokens: of an answer; null: twice the longest reference.

    Raises:
        Refusal: the model, the rows or the words must be changed first.
        RunFailed: a process failed.
    """
    return evaluation.evaluate(
        _word(run),
        *overrides,
        samples=samples,
        metrics=metrics,
        tasks=tasks,
        bits=bits,
        max_new_tokens=max_new_tokens,
        say=say,
    )


def generate(
    run: Place | None,
    prompt: str | Sequence[dict[str, Any]] | Sequence[str | Sequence[dict[str, Any]]],
    *overrides: str,
    compare: bool = False,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    bits: int | None = None,
    say: Callable[[str], None] = print,
) -> Answers:
    """Answer a prompt or several, with a run, a checkpoint, an adapter or a model.

    Args:
        run: null: the overrides name a model.
        prompt: a text, a conversation (`[{"role": ..., "content": ...}]`), or a list of either.
        compare: the base answers too, before the tuned model.
        temperature: 0 is the likeliest token each time; null: as the model was saved.
        max_new_tokens: null: as the model was saved, or 512.
        bits: 4 or 8: the base is quantised while it is loaded.

    Raises:
        Refusal: the model, a prompt or the words must be changed first.
    """
    return Answers(
        generation.generate(
            _word(run),
            prompt,
            *overrides,
            compare=compare,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            bits=bits,
            say=say,
        )
    )


def _word(run: Place | None) -> str | None:
    return None if run is None else os.fspath(run)


def _told(answer: Answer) -> str:
    return answer.text if answer.finished else f"{answer.text} [cut off after {answer.tokens} tokens]"
