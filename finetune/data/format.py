"""What the rows of a source look like: recognised from their columns, or as the source says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.schema import DataConfig, Format, LossOn, SourceConfig, Thinking
from finetune.data.chunk import Chunk
from finetune.data.own_format import apply, load_function
from finetune.data.source import SUBJECT
from finetune.data.turns import THOUGHT_NAMES
from finetune.errors import Problem, Refusal, refuse

NEEDS = {
    Format.messages: ("messages",),
    Format.sharegpt: ("conversations",),
    Format.prompt_completion: ("prompt", "completion"),
    Format.alpaca: ("instruction", "output"),
    Format.text: ("text",),
    Format.tokenized: ("input_ids",),
}
"""The columns that make a format, in the order in which formats are recognised."""

MAY_HAVE = {
    Format.messages: ("tools",),
    Format.sharegpt: ("system", "tools"),
    Format.alpaca: ("input", "system", "history"),
    Format.prompt_completion: ("tools",),
    Format.text: (),
    Format.tokenized: ("labels",),
}

WHOLE = (Format.text, Format.tokenized)
"""Formats without turns: no chat template is applied."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of one source are read."""

    format: Format
    columns: dict[str, str]
    """{our name: column in the file}, every name that is read (the optional ones where a row has them)."""
    found: tuple[str, ...]
    """The columns of the file."""
    chat: bool
    """Rows become turns of the chat template."""
    loss_on: LossOn
    thinking: Thinking
    thoughts_apart: bool
    """The chat template reads thoughts from a field of the turn, not from its content."""
    function: str | None = None
    """The user's own function that makes rows of this format from those of the file."""

    @property
    def form(self) -> str:
        """The canonical form, which must be one for all sources of a split."""
        if self.chat:
            return "conversation"
        return self.format.value if self.format in WHOLE else "prompt with completion"

    def __str__(self) -> str:
        renamed = [f"{ours} <- {theirs}" for ours, theirs in self.columns.items() if ours != theirs]
        name = f"{self.format.value} ({', '.join(renamed)})" if renamed else self.format.value
        name = f"{name}, made by {self.function}" if self.function else name
        if self.format in (Format.prompt_completion, Format.alpaca):
            how = (
                "user and assistant turns of the chat template"
                if self.chat
                else "plain prompt and completion"
            )
            return f"{name}, as {how}"
        return name


def recognise(source: SourceConfig, chunk: Chunk, template: str | None, data: DataConfig) -> Layout:
    """Decide from a file's first rows how it is read."""
    numbers, rows, problems = chunk.rows()
    if source.format is not None and ":" in source.format:
        function = load_function(source.format)
        made, _, wrong = apply(function, source.format, chunk, numbers, rows)
        problems += wrong
        rows = [row for _, row in made]
        if not rows and not problems:
            why = f"it left out all of the first {len(numbers)} rows of {chunk.file}"
            raise refuse(f"format={source.format}", why, subject=SUBJECT)
    if not rows:
        raise Refusal(problems[:20], SUBJECT)
    if source.format is not None and ":" in source.format:
        whole = replace(source, format=None, columns={})
        return replace(_layout(whole, chunk, rows, template, data), function=source.format)
    return _layout(source, chunk, rows, template, data)


def _layout(
    source: SourceConfig, chunk: Chunk, rows: list[dict[str, Any]], template: str | None, data: DataConfig
) -> Layout:
    found = Counter(name for row in rows for name in row)
    known = {name for names in (*NEEDS.values(), *MAY_HAVE.values()) for name in names}
    wrong = [
        Problem(f"columns: {{{ours}: {theirs}}}", why, fix)
        for ours, theirs in source.columns.items()
        for why, fix in _wrong_mapping(ours, theirs, known, found)
    ]
    if wrong:
        raise Refusal(wrong, f"the column mapping of {chunk.file}")
    taken = set(source.columns.values())
    names = {name for name in found if name not in taken} | set(source.columns)
    chosen = Format(source.format) if source.format else _recognised(names, source.columns)
    if chosen is None or not names.issuperset(NEEDS[chosen]):
        raise _unknown(source, chunk.file, found)
    used = (*NEEDS[chosen], *MAY_HAVE[chosen])
    unused = [name for name in source.columns if name not in used]
    if unused:
        why = f"{', '.join(unused)} is mapped, but {chosen.value} rows have no such column"
        raise refuse(chunk.file, why, f"They have: {', '.join(used)}.", subject=SUBJECT)
    columns = {
        name: source.columns.get(name, name) for name in used if name in source.columns or name not in taken
    }
    if chosen in (Format.messages, Format.sharegpt) and source.format is None:
        chosen = _by_turn_keys(chosen, columns, rows)
        columns = {NEEDS[chosen][0]: next(iter(columns.values())), **dict(list(columns.items())[1:])}
    turns_given = chosen is Format.prompt_completion and any(
        isinstance(row.get(columns[name]), list) for row in rows for name in NEEDS[chosen]
    )
    chat = chosen not in WHOLE and (template or turns_given or chosen in (Format.messages, Format.sharegpt))
    if data.loss_on is LossOn.completion and chosen in (Format.messages, Format.sharegpt):
        why = f"{chunk.file} holds {chosen.value} rows, which have no completion"
        raise refuse("data.loss_on=completion", why, "Use assistant or last_assistant.", subject=SUBJECT)
    apart = any(name in (template or "") for name in THOUGHT_NAMES)
    return Layout(chosen, columns, tuple(map(str, found)), bool(chat), data.loss_on, data.thinking, apart)


def _wrong_mapping(ours: str, theirs: str, known: set[str], found: Iterable[str]) -> list[tuple[str, str]]:
    if ours not in known:
        fix = f"Our names: {', '.join(sorted(known))}. The mapping reads {{our name: column in the file}}."
        return [(f"{ours} is not a name that we read", fix)]
    if theirs not in found:
        return [(f"the file has no column {theirs}", f"It has: {', '.join(map(str, found))}.")]
    return []


def _recognised(names: set[str], mapped: dict[str, str]) -> Format | None:
    fitting = [name for name, needs in NEEDS.items() if names.issuperset(needs)]
    by_mapping = [name for name in fitting if mapped and set(mapped) <= {*NEEDS[name], *MAY_HAVE[name]}]
    return next(iter(by_mapping or fitting), None)


def _unknown(source: SourceConfig, file: str, found: Iterable[str]) -> Refusal:
    columns = list(map(str, found))
    sets = "; ".join(f"{name.value}: {' + '.join(needs)}" for name, needs in NEEDS.items())
    asked = f"not those of format={source.format}" if source.format else "none of the accepted sets"
    example = f"columns: {{text: {columns[0] if columns else 'COLUMN'}}}"
    if len(columns) > 1:
        example = f"columns: {{prompt: {columns[0]}, completion: {columns[1]}}}"
    fix = f"Accepted: {sets}. Map yours on the source, e.g. `{example}`."
    return refuse(file, f"found the columns {', '.join(columns)}, {asked}", fix, subject=SUBJECT)


def _by_turn_keys(chosen: Format, columns: dict[str, str], rows: list[dict[str, Any]]) -> Format:
    """Tell role/content from from/value, whichever name the column has."""
    column = columns[NEEDS[chosen][0]]
    for row in rows:
        turns = row.get(column)
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            return Format.sharegpt if '"from"' in turns[:200] else Format.messages
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if "role" in turns[0]:
                return Format.messages
            if "from" in turns[0]:
                return Format.sharegpt
    return chosen
