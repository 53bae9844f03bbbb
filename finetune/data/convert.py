"""Rows in their one form: a conversation, a prompt with its completion, text, or token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from finetune.config.schema import Format, LossOn, Thinking
from finetune.data.chunk import Chunk
from finetune.data.format import Layout
from finetune.data.own_format import call_on_rows, load_function
from finetune.data.turns import BadRow, messages, sharegpt, thoughts, tools, type_of, value_of
from finetune.errors import Problem

BLANK = "nothing to learn: empty or blank"
NO_ANSWER = "no answer to learn"


@dataclass(frozen=True, slots=True)
class Example:
    """One row in its canonical form."""

    index: int
    """0-based place among the rows read for the split."""
    number: int
    """1-based line or row of its file."""
    turns: list[dict[str, Any]] | None = None
    answers: tuple[int, ...] = ()
    """The turns that are learnt."""
    tools: list[Any] | None = None
    thinking: bool | None = None
    """What the chat template is told of thinking; None: nothing."""
    prompt: str | None = None
    text: str = ""
    ids: list[int] | None = None
    labels: list[int] | None = None


@dataclass(slots=True)
class Converted:
    """The rows of one chunk after conversion."""

    examples: list[Example] = field(default_factory=list)
    dropped: list[tuple[str, int, int]] = field(default_factory=list)
    """(reason, index, number) of each row left out."""
    problems: list[Problem] = field(default_factory=list)


def convert(chunk: Chunk, layout: Layout, first_index: int) -> Converted:
    """Bring a chunk's rows into canonical form; a bad row is named, never repaired."""
    numbers, rows, problems = chunk.rows()
    result = Converted(problems=problems)
    index = {number: first_index + place for place, number in enumerate(chunk.numbers)}
    numbered = list(zip(numbers, rows, strict=True))
    if layout.function is not None:
        function = load_function(layout.function)
        numbered, left_out, wrong = call_on_rows(function, layout.function, chunk, numbers, rows)
        result.problems += wrong
        result.dropped += [(f"left out by {layout.function}", index[number], number) for number in left_out]
    for number, row in numbered:
        try:
            example = _example(row, layout, index[number], number)
        except BadRow as bad:
            result.problems.append(chunk.problem(number, str(bad)))
        except _Nothing as nothing:
            result.dropped.append((str(nothing), index[number], number))
        else:
            result.examples.append(example)
    return result


class _Nothing(Exception):
    """A sound row with nothing in it to learn."""


def _example(row: dict[str, Any], layout: Layout, index: int, number: int) -> Example:
    columns = layout.columns
    if layout.format is Format.tokenized:
        ids, labels = _tokens(row, columns)
        return Example(index, number, ids=ids, labels=labels)
    if layout.format is Format.text:
        text = _text(row, columns["text"])
        if not text.strip():
            raise _Nothing(BLANK)
        return Example(index, number, text=text)
    if layout.format is Format.messages:
        turns = _with_system(messages(row, columns["messages"]), _system(row, columns))
        return _conversation(index, number, layout, turns, tools=tools(row, columns.get("tools")))
    if layout.format is Format.sharegpt:
        turns = _with_system(sharegpt(row, columns["conversations"]), _system(row, columns))
        return _conversation(index, number, layout, turns, tools=tools(row, columns.get("tools")))
    if layout.format is Format.alpaca:
        return _alpaca(row, layout, index, number)
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(row.get(prompt), list) or isinstance(row.get(completion), list):
        if not layout.chat:
            raise BadRow(
                f"column '{prompt}' or '{completion}' holds messages, in the first rows they hold text"
            )
        before = messages(row, prompt)
        turns = before + messages(row, completion)
        callable_tools = tools(row, columns.get("tools"))
        return _conversation(index, number, layout, turns, completion_from=len(before), tools=callable_tools)
    return _question(index, number, layout, [], _text(row, prompt), _text(row, completion))


def _question(
    index: int, number: int, layout: Layout, before: list[dict[str, Any]], prompt: str, completion: str
) -> Example:
    if not completion.strip():
        raise _Nothing(BLANK)
    if not layout.chat:
        return Example(index, number, prompt=prompt, text=completion)
    turns = [*before, {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    only_completion = layout.format is Format.prompt_completion or layout.wanted.loss_on is LossOn.completion
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
    thinks = thoughts(turns, layout.wanted.thinking, apart=layout.wanted.thoughts_apart)
    answers = [
        place for place, turn in enumerate(turns) if turn["role"] == "assistant" and place >= completion_from
    ]
    if layout.wanted.loss_on is LossOn.last_assistant:
        answers = answers[-1:]
    learnt = tuple(
        place for place in answers if turns[place].get("train", True) and turns[place].get("weight", 1)
    )
    if not learnt and layout.wanted.loss_on is not LossOn.all:
        raise _Nothing(NO_ANSWER)
    if any(not turns[place]["content"].strip() and not turns[place].get("tool_calls") for place in learnt):
        raise _Nothing(BLANK)
    told = {Thinking.keep: True if thinks else None, Thinking.mixed: thinks, Thinking.off: False}
    return Example(
        index, number, turns=turns, answers=learnt, tools=tools, thinking=told[layout.wanted.thinking]
    )


def _tokens(row: dict[str, Any], columns: dict[str, str]) -> tuple[list[int], list[int] | None]:
    """Token ids as the file gives them, and their labels: each the id itself, or -100."""
    ids = _integers(row, columns["input_ids"])
    if not ids:
        raise _Nothing(BLANK)
    if columns.get("labels") is None or row.get(columns["labels"]) is None:
        return ids, None
    labels = _integers(row, columns["labels"])
    if len(labels) != len(ids):
        raise BadRow(f"{len(labels)} labels for {len(ids)} input_ids")
    wrong = next((i for i, (a, b) in enumerate(zip(labels, ids, strict=True)) if a not in (b, -100)), None)
    if wrong is not None:
        why = f"labels[{wrong}] is {labels[wrong]}, but input_ids[{wrong}] is {ids[wrong]}"
        raise BadRow(f"{why}: a label is the token itself or -100 (the model shifts them)")
    if all(label == -100 for label in labels):
        raise _Nothing(NO_ANSWER)
    return ids, labels


def _integers(row: dict[str, Any], column: str) -> list[int]:
    value = value_of(row, column)
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise BadRow(f"column '{column}' holds {type_of(value)}, not a list of whole numbers")
    return value


def _text(row: dict[str, Any], column: str) -> str:
    value = value_of(row, column)
    if not isinstance(value, str):
        raise BadRow(f"column '{column}' holds {type_of(value)}, not text")
    return value


def _optional_text(row: dict[str, Any], column: str | None) -> str:
    return _text(row, column) if column is not None and row.get(column) is not None else ""


def _system(row: dict[str, Any], columns: dict[str, str]) -> list[dict[str, Any]]:
    text = _optional_text(row, columns.get("system"))
    return [{"role": "system", "content": text}] if text.strip() else []


def _with_system(turns: list[dict[str, Any]], system: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if system and turns[0]["role"] == "system" and turns[0]["content"] != system[0]["content"]:
        raise BadRow("the conversation begins with another system turn than column 'system' holds")
    return turns if turns[0]["role"] == "system" else system + turns


def _history(row: dict[str, Any], column: str | None) -> list[dict[str, Any]]:
    value = row.get(column) if column is not None else None
    turns = []
    for place, pair in enumerate(value or []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise BadRow(f"{column}[{place}] must be a pair of texts: question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns
