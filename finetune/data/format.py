"""What the rows of a source look like: recognised from their columns, or as the source says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from finetune.config.schema import Format, LossOn, SourceConfig, Thinking
from finetune.data.chunk import Chunk
from finetune.data.own_format import call_on_rows, load_function
from finetune.data.source import SUBJECT
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
    Format.messages: ("tools", "system"),
    Format.sharegpt: ("system", "tools"),
    Format.alpaca: ("input", "system", "history"),
    Format.prompt_completion: ("tools",),
    Format.text: (),
    Format.tokenized: ("labels",),
}

TURNS = (Format.messages, Format.sharegpt)
"""Formats whose rows are lists of turns."""

WHOLE = (Format.text, Format.tokenized)
"""Formats without turns: no chat template is applied."""

SHOWN_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rows are read for, whatever file they are in."""

    has_template: bool
    thoughts_apart: bool
    """The chat template reads thoughts from a field of the turn, not from its content."""
    loss_on: LossOn
    thinking: Thinking


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
    wanted: Wanted
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
        if self.function:
            name += f", made by {self.function}"
        if self.format in (Format.prompt_completion, Format.alpaca):
            turns = "user and assistant turns of the chat template"
            name += f", as {turns if self.chat else 'plain prompt and completion'}"
        unread = [column for column in self.found if column not in self.columns.values()]
        shown = ", ".join(unread[:SHOWN_COLUMNS]) + (", ..." if len(unread) > SHOWN_COLUMNS else "")
        return f"{name}; not read: {shown}" if unread else name


def recognise(source: SourceConfig, chunk: Chunk, wanted: Wanted) -> Layout:
    """Decide from a file's first rows how it is read."""
    numbers, rows, problems = chunk.rows()
    own = source.format if source.format is not None and ":" in source.format else None
    if own is not None:
        made, _, wrong = call_on_rows(load_function(own), own, chunk, numbers, rows)
        problems += wrong
        rows = [row for _, row in made]
        if not rows and not problems:
            why = f"it left out all of the first {len(numbers)} rows of {chunk.file}"
            raise refuse(f"format={own}", why, subject=SUBJECT)
    if not rows:
        raise Refusal(problems[:20], SUBJECT)
    if own is None:
        return _layout(source, chunk, rows, wanted)
    return replace(_layout(replace(source, format=None, columns={}), chunk, rows, wanted), function=own)


def _layout(source: SourceConfig, chunk: Chunk, rows: list[dict[str, Any]], wanted: Wanted) -> Layout:
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
    first = source.columns.get(NEEDS[chosen][0], NEEDS[chosen][0])
    if source.format is None:
        chosen = _by_turn_keys(chosen, first, rows)
    used = (*NEEDS[chosen], *MAY_HAVE[chosen])
    unused = [name for name, column in source.columns.items() if name not in used and column != first]
    if unused:
        why = f"{', '.join(unused)} is mapped, but {chosen.value} rows have no such column"
        raise refuse(chunk.file, why, f"They have: {', '.join(used)}.", subject=SUBJECT)
    columns = {
        name: source.columns.get(name, name) for name in used if name in source.columns or name not in taken
    }
    columns[NEEDS[chosen][0]] = first
    turns_given = chosen is Format.prompt_completion and any(
        isinstance(row.get(columns[name]), list) for row in rows for name in NEEDS[chosen]
    )
    chat = chosen not in WHOLE and (wanted.has_template or turns_given or chosen in TURNS)
    if wanted.loss_on is LossOn.completion and chosen in TURNS:
        why = f"{chunk.file} holds {chosen.value} rows, which have no completion"
        raise refuse("data.loss_on=completion", why, "Use assistant or last_assistant.", subject=SUBJECT)
    return Layout(chosen, columns, tuple(map(str, found)), chat, wanted)


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
    columns = [name if name == name.strip() else repr(name) for name in map(str, found)]
    sets = "; ".join(f"{name.value}: {' + '.join(needs)}" for name, needs in NEEDS.items())
    asked = f"not those of format={source.format}" if source.format else "none of the accepted sets"
    needed = NEEDS[Format(source.format)] if source.format else ("prompt", "completion")
    needed = needed if len(columns) >= len(needed) else ("text",)
    example = ", ".join(f"{ours}: {theirs}" for ours, theirs in zip(needed, columns, strict=False))
    if source.columns:
        asked += f" with columns: {source.columns}"
    fix = f"Accepted: {sets}. Map yours on the source, e.g. `columns: {{{example}}}`."
    return refuse(file, f"found the columns {', '.join(columns)}, {asked}", fix, subject=SUBJECT)


def _by_turn_keys(chosen: Format, column: str, rows: list[dict[str, Any]]) -> Format:
    """Tell role/content from from/value, whichever name the column has."""
    if chosen not in TURNS:
        return chosen
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
