"""What will a run learn, from Python: counts, lengths, and samples with the learnt text marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.report.cells import data_cell
from finetune.report.data_text import length_lines, sample_lines
from finetune.report.shown import WIDTH
from finetune.training.data_alone import DataAlone, prepare_alone

if TYPE_CHECKING:
    import pandas

COUNTS = ("rows_read", "rows_used", "tokens", "supervised_tokens", "truncated", "duplicates")


class DataView:
    """Prepared data to look at: text in a terminal, coloured samples in a notebook."""

    def __init__(self, data: DataAlone) -> None:
        self._data = data

    @property
    def statistics(self) -> dict[str, Any]:
        """What `finetune prepare --json` prints: `train`, `eval` and `steps`."""
        return self._data.record

    @property
    def table(self) -> pandas.DataFrame:
        """The counts, one row for each split."""
        import pandas

        splits = {name: said for name, said in self._data.statistics.items() if said is not None}
        return pandas.DataFrame(
            [{name: said[name] for name in COUNTS} for said in splits.values()], index=list(splits)
        )

    @property
    def samples(self) -> pandas.DataFrame:
        """The first rows: their split and place, the text as the model reads it, and what is learnt of it."""
        import pandas

        rows = [
            (name, sample["place"], sample["text"], sample["supervised_text"])
            for name, said in self._data.statistics.items()
            if said is not None
            for sample in said["samples"]
        ]
        return pandas.DataFrame(rows, columns=["split", "place", "text", "supervised_text"])

    @property
    def page(self) -> Path:
        """All of it as one HTML page."""
        return self._data.page

    def __repr__(self) -> str:
        lines = list(self._data.lines)
        for name, said in self._data.statistics.items():
            if said is not None:
                lines += ["", *length_lines(name, said), ""]
                lines += sample_lines(name, said, colour=False, columns=WIDTH)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return data_cell(self._data.statistics, self._data.lines)


def prepare(*overrides: str) -> DataView:
    """Load, check, tokenise, mask and pack the rows, as `finetune prepare` does; a run finds them made.

    Raises:
        Refusal: the config or a row must be changed first.
    """
    return DataView(prepare_alone(list(overrides)))
