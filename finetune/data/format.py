"""What the rows of a source look like, and their one form: conversation, prompt with completion, or text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune.config.schema import Format, LossOn, SourceConfig
from finetune.data.load import SUBJECT, Chunk
from finetune.errors import Problem, Refusal, refuse

NEEDS = {
    Format.messages: ("messages",),
    Format.sharegpt: ("conversations",),
    Format.prompt_completion: ("prompt", "completion"),
    Format.alpaca: ("instruction", "output"),
    Format.text: ("text",),
}
"""The columns that make a format, in the order in which formats are recognised."""

MAY_HAVE = {
    Format.messages: ("tools",),
    Format.sharegpt: ("system",),
    Format.alpaca: ("input", "system", "history"),
    Format.prompt_completion: (),
    Format.text: (),
}

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}

BLANK = "nothing to learn: empty or blank"
NO_ANSWER = "no answer to learn"


@dataclass(frozen=True, slots=True)
class Example:
    """One row in its canonical form: turns of a conversation, or plain text after an optional prompt."""

    index: int
    """0-based place among the rows read for the split."""
    number: int
    """1-based line or row of its file."""
    turns: list[dict[str, Any]] | None = None
    answers: tuple[int, ...] = ()
    """The turns that are learnt."""
    tools: list[Any] | None = None
    prompt: str | None = None
    text: str = ""


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

    @property
    def form(self) -> str:
        """The canonical form, which must be one for all sources of a split."""
        if self.chat:
            return "conversation"
        return "text" if self.format is Format.text else "prompt with completion"

    def __str__(self) -> str:
        renamed = [f"{ours} <- {theirs}" for ours, theirs in self.columns.items() if ours != theirs]
        name = f"{self.format.value} ({', '.join(renamed)})" if renamed else self.format.value
        if self.format in (Format.prompt_completion, Format.alpaca):
            how = (
                "user and assistant turns of the chat template"
                if self.chat
                else "plain prompt and completion"
            )
            return f"{name}, as {how}"
        return name


@dataclass(slots=True)
class Converted:
    """The rows of one chunk after conversion."""

    examples: list[Example] = field(default_factory=list)
    dropped: list[tuple[str, int, int]] = field(default_factory=list)
    """(reason, index, number) of each row left out."""
    problems: list[Problem] = field(default_factory=list)


def recognise(source: SourceConfig, chunk: Chunk, has_template: bool, loss_on: LossOn) -> Layout:
    """Decide from a file's first rows how it is read."""
    _, rows, problems = chunk.rows()
    if not rows:
        raise Refusal(problems[:20], SUBJECT)
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
    chosen = source.format or _recognised(names, source.columns)
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
    chat = chosen is not Format.text and (
        has_template or turns_given or chosen in (Format.messages, Format.sharegpt)
    )
    if loss_on is LossOn.completion and chosen in (Format.messages, Format.sharegpt):
        why = f"{chunk.file} holds {chosen.value} rows, which have no completion"
        raise refuse("data.loss_on=completion", why, "Use assistant or last_assistant.", subject=SUBJECT)
    return Layout(chosen, columns, tuple(map(str, found)), chat, loss_on)


def convert(chunk: Chunk, layout: Layout, first_index: int) -> Converted:
    """Bring a chunk's rows into canonical form; a bad row is named, never repaired."""
    numbers, rows, problems = chunk.rows()
    result = Converted(problems=problems)
    index = {number: first_index + place for place, number in enumerate(chunk.numbers)}
    for number, row in zip(numbers, rows, strict=True):
        try:
            example = _example(row, layout, index[number], number)
        except _BadRow as bad:
            result.problems.append(chunk.problem(number, str(bad)))
        except _Nothing as nothing:
            result.dropped.append((str(nothing), index[number], number))
        else:
            result.examples.append(example)
    return result


class _BadRow(Exception):
    """A row that must be corrected in the file."""


class _Nothing(Exception):
    """A sound row with nothing in it to learn."""


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
    asked = f"not those of format={source.format.value}" if source.format else "none of the accepted sets"
    example = f"columns: {{text: {columns[0]}}}"
    if len(columns) > 1:
        example = f"columns: {{prompt: {columns[0]}, completion: {columns[1]}}}"
    fix = f"Accepted: {sets}. Map yours on the source, e.g. `{example}`."
    return refuse(file, f"found the columns {', '.join(columns)}, {asked}", fix, subject=SUBJECT)


def _by_turn_keys(chosen: Format, columns: dict[str, str], rows: list[dict[str, Any]]) -> Format:
    """Tell role/content from from/value, whichever name the column has."""
    column = columns[NEEDS[chosen][0]]
    for row in rows:
        turns = row.get(column)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if "role" in turns[0]:
                return Format.messages
            if "from" in turns[0]:
                return Format.sharegpt
    return chosen


def _example(row: dict[str, Any], layout: Layout, index: int, number: int) -> Example:
    columns = layout.columns
    if layout.format is Format.text:
        text = _text(row, columns["text"])
        if not text.strip():
            raise _Nothing(BLANK)
        return Example(index, number, text=text)
    if layout.format is Format.messages:
        turns = _turns(row, columns["messages"])
        return _conversation(index, number, layout, turns, tools=_tools(row, columns.get("tools")))
    if layout.format is Format.sharegpt:
        turns = _system(row, columns) + _sharegpt_turns(row, columns["conversations"])
        return _conversation(index, number, layout, turns)
    if layout.format is Format.alpaca:
        return _alpaca(row, layout, index, number)
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(row.get(prompt), list) or isinstance(row.get(completion), list):
        before = _turns(row, prompt)
        return _conversation(
            index, number, layout, before + _turns(row, completion), completion_from=len(before)
        )
    return _question(index, number, layout, [], _text(row, prompt), _text(row, completion))


def _question(
    index: int, number: int, layout: Layout, before: list[dict[str, Any]], prompt: str, completion: str
) -> Example:
    if not completion.strip():
        raise _Nothing(BLANK)
    if not layout.chat:
        return Example(index, number, prompt=prompt, text=completion)
    turns = [*before, {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    only_completion = layout.format is Format.prompt_completion or layout.loss_on is LossOn.completion
    return _conversation(
        index, number, layout, turns, completion_from=len(turns) - 1 if only_completion else 0
    )


def _alpaca(row: dict[str, Any], layout: Layout, index: int, number: int) -> Example:
    columns = layout.columns
    asked = _text(row, columns["instruction"])
    extra = _optional_text(row, columns.get("input"))
    question = f"{asked}\n{extra}" if extra.strip() else asked
    answer = _text(row, columns["output"])
    before = _system(row, columns) + _history(row, columns.get("history"))
    if layout.chat:
        return _question(index, number, layout, before, question, answer)
    prompt = "".join(f"{turn['content']}\n" for turn in before) + f"{question}\n"
    return _question(index, number, layout, [], prompt, answer)


def _conversation(
    index: int,
    number: int,
    layout: Layout,
    turns: list[dict[str, Any]],
    *,
    completion_from: int = 0,
    tools: list[Any] | None = None,
) -> Example:
    answers = [
        place for place, turn in enumerate(turns) if turn["role"] == "assistant" and place >= completion_from
    ]
    if layout.loss_on is LossOn.last_assistant:
        answers = answers[-1:]
    learnt = tuple(
        place for place in answers if turns[place].get("train", True) and turns[place].get("weight", 1)
    )
    if not learnt and layout.loss_on is not LossOn.all:
        raise _Nothing(NO_ANSWER)
    if any(not turns[place]["content"].strip() and not turns[place].get("tool_calls") for place in learnt):
        raise _Nothing(BLANK)
    return Example(index, number, turns=turns, answers=learnt, tools=tools)


def _value(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise _BadRow(f"column '{column}' is missing")
    if row[column] is None:
        raise _BadRow(f"column '{column}' is null (empty)")
    return row[column]


def _text(row: dict[str, Any], column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise _BadRow(f"column '{column}' holds {_type(value)}, not text")
    return value


def _optional_text(row: dict[str, Any], column: str | None) -> str:
    return _text(row, column) if column is not None and row.get(column) is not None else ""


def _turns(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    value = _value(row, column)
    if not isinstance(value, list):
        raise _BadRow(f"column '{column}' holds {_type(value)}, not a list of messages")
    if not value:
        raise _BadRow(f"column '{column}' is an empty list")
    return [_turn(turn, f"{column}[{place}]") for place, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _BadRow(f"{where} holds {_type(turn)}, not a message with role and content")
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise _BadRow(f"{where}.role is {role!r}; known are {', '.join(ROLES)}")
    if content is None and turn.get("tool_calls"):
        content = ""
    if content is None:
        raise _BadRow(f"{where}.content is {'null' if 'content' in turn else 'missing'}")
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str):
        raise _BadRow(f"{where}.content holds {_type(content)}, not text")
    if len(turn) == 2:
        return {"role": role, "content": content}
    return {**{key: value for key, value in turn.items() if value is not None}, "content": content}


def _joined(parts: list[Any], where: str) -> str:
    """Join content given as parts, which must all be text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _BadRow(f"{where}.content has a part that is not text")
    return "".join(texts)  # type: ignore[arg-type]


def _sharegpt_turns(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    value = _value(row, column)
    if not isinstance(value, list) or not value:
        raise _BadRow(f"column '{column}' is {'an empty list' if value == [] else _type(value)}")
    turns = []
    for place, turn in enumerate(value):
        where = f"{column}[{place}]"
        if not isinstance(turn, dict):
            raise _BadRow(f"{where} holds {_type(turn)}, not an object with from and value")
        if turn.get("from") not in SHAREGPT_ROLES:
            raise _BadRow(f"{where}.from is {turn.get('from')!r}; known are {', '.join(SHAREGPT_ROLES)}")
        if not isinstance(turn.get("value"), str):
            raise _BadRow(f"{where}.value is {_type(turn.get('value'))}, not text")
        turns.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return turns


def _system(row: dict[str, Any], columns: dict[str, str]) -> list[dict[str, Any]]:
    text = _optional_text(row, columns.get("system"))
    return [{"role": "system", "content": text}] if text.strip() else []


def _history(row: dict[str, Any], column: str | None) -> list[dict[str, Any]]:
    value = row.get(column) if column is not None else None
    turns = []
    for place, pair in enumerate(value or []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise _BadRow(f"{column}[{place}] must be a pair of texts: question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _tools(row: dict[str, Any], column: str | None) -> list[Any] | None:
    value = row.get(column) if column is not None else None
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise _BadRow(f"column '{column}' is not valid JSON: {error}") from error
    if value and not isinstance(value, list):
        raise _BadRow(f"column '{column}' holds {_type(value)}, not a list of tools")
    return value or None


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__
