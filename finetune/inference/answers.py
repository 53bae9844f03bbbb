"""What was answered, to look at: text in a terminal, a table in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.report.cells import table
from finetune.report.evaluation_text import printable, side_by_side
from finetune.report.shown import WIDTH

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model answered to one prompt."""

    model: str
    """`base` or `tuned`."""
    prompt: str
    """The last turn."""
    text: str
    tokens: int
    """New tokens, the stop token included."""
    finished: bool
    """It ended by itself, and was not cut off."""


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
                lines += side_by_side({one.model: printable(_told(one)) for one in own}, WIDTH)
        return "\n".join(lines[1:])

    def _repr_html_(self) -> str:
        rows = [[own[0].prompt, *map(_told, own)] for own in self._by_prompt()]
        return table(["prompt", *dict.fromkeys(one.model for one in self)], rows)

    def _by_prompt(self) -> list[list[Answer]]:
        models = len({one.model for one in self})
        return [self[start : start + models] for start in range(0, len(self), models or 1)]


def _told(answer: Answer) -> str:
    return answer.text if answer.finished else f"{answer.text} [cut off after {answer.tokens} tokens]"
