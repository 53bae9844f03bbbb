"""One conversation: its turns with tool calls and thoughts, in the form that chat templates read."""

from __future__ import annotations

import json
import re
from typing import Any

from finetune.config.schema import Thinking
from finetune.model.tokenizer import THOUGHT_NAMES

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}

THOUGHT = re.compile(r"\s*(?:<think>(?P<closed>.*?)|(?P<opened>(?:(?!<think>).)*?\n))</think>\s*", re.DOTALL)
"""A thought before an answer; its opening tag is missing where the prompt had opened it."""


class BadRow(Exception):
    """A row that must be corrected in the file."""


def value_of(row: dict[str, Any], column: str) -> Any:
    """Read a column that must be there."""
    if column not in row:
        raise BadRow(f"column '{column}' is missing")
    if row[column] is None:
        raise BadRow(f"column '{column}' is null (empty)")
    return row[column]


def messages(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Read turns of role and content; a list written as JSON text is one too."""
    value = _list(value_of(row, column), f"column '{column}'", "messages")
    if not value:
        raise BadRow(f"column '{column}' is an empty list")
    return [_message(turn, f"{column}[{place}]") for place, turn in enumerate(value)]


def sharegpt(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Read turns of `from` and `value`."""
    value = _list(value_of(row, column), f"column '{column}'", "turns")
    if not value:
        raise BadRow(f"column '{column}' is an empty list")
    return [_sharegpt_turn(turn, f"{column}[{place}]") for place, turn in enumerate(value)]


def tools(row: dict[str, Any], column: str | None) -> list[Any] | None:
    """Read the tools that a conversation may call, given as a list or as JSON text."""
    value = row.get(column) if column is not None else None
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    listed = _list(value, f"column '{column}'", "tools")
    return [_object(tool, f"{column}[{place}]", "tool") for place, tool in enumerate(listed)] or None


def thoughts(turns: list[dict[str, Any]], thinking: Thinking, *, apart: bool) -> bool:
    """Bring the thoughts of the answers into the form that the template reads, or take them out (`off`).

    `apart`: the template has a field for them; else they stand in the content, between think tags. Returns
    whether there is any.
    """
    found = False
    for turn in turns:
        if turn["role"] != "assistant":
            continue
        written = THOUGHT.match(turn["content"]) if "</think>" in turn["content"] else None
        in_content = (written["closed"] or written["opened"] or "").strip("\n") if written else ""
        thought = turn.get(THOUGHT_NAMES[0], "") or in_content
        if in_content.strip() not in ("", thought.strip()):
            raise BadRow("an answer holds two different thoughts: in its content and in a field of its own")
        if thinking is Thinking.off or apart or not thought.strip():
            for name in THOUGHT_NAMES:
                turn.pop(name, None)
            if written:
                turn["content"] = turn["content"][written.end() :]
        if thinking is Thinking.off or not thought.strip():
            continue
        found = True
        if apart:
            turn.update(dict.fromkeys(THOUGHT_NAMES, thought))
        elif not written:
            for name in THOUGHT_NAMES:
                turn.pop(name, None)
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
    return found


def tool_name(tool: dict[str, Any]) -> str:
    """The name of a tool, in either of the shapes that are in use."""
    return str(tool.get("function", tool).get("name", ""))


def unprinted_thoughts(turns: list[dict[str, Any]], text: str) -> int:
    """Count the thoughts that do not stand in the rendered text."""
    given = [turn[THOUGHT_NAMES[0]].strip() for turn in turns if THOUGHT_NAMES[0] in turn]
    return sum(thought not in text for thought in given)


def type_of(value: Any) -> str:
    """Name a value's type in an error."""
    return "null" if value is None else type(value).__name__


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"{where} holds {type_of(turn)}, not a message with role and content")
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise BadRow(f"{where}.role is {role!r}; known are {', '.join(ROLES)}")
    if content is None and turn.get("tool_calls"):
        content = ""
    if content is None:
        raise BadRow(f"{where}.content is {'null' if 'content' in turn else 'missing'}")
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str):
        raise BadRow(f"{where}.content holds {type_of(content)}, not text")
    if turn.keys() == {"role", "content"}:
        return {"role": role, "content": content}
    kept = {key: entry for key, entry in turn.items() if entry is not None and key not in THOUGHT_NAMES}
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    else:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], where)
    return {**kept, **_thought(turn, where), "content": content}


def _thought(turn: dict[str, Any], where: str) -> dict[str, str]:
    """The thought before an answer, under each name by which a template may look for it."""
    given = {name: turn[name] for name in THOUGHT_NAMES if turn.get(name) not in (None, "")}
    for name, thought in given.items():
        if not isinstance(thought, str):
            raise BadRow(f"{where}.{name} holds {type_of(thought)}, not text")
    if len(set(given.values())) > 1:
        raise BadRow(f"{where} holds two different thoughts: {' and '.join(given)}")
    return dict.fromkeys(THOUGHT_NAMES, next(iter(given.values()))) if given else {}


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as `{"type": "function", "function": {"name", "arguments": object}}`."""
    calls = []
    for place, call in enumerate(_list(value, f"{where}.tool_calls", "tool calls")):
        at = f"{where}.tool_calls[{place}]"
        call = _object(call, at, "tool call")
        function = _object(call.get("function", call), f"{at}.function", "function")
        if not isinstance(function.get("name"), str):
            raise BadRow(f"{at} has no name")
        arguments = function.get("arguments")
        arguments = (
            {} if arguments in (None, "") else _object(arguments, f"{at}.arguments", "argument object")
        )
        outer = {key: entry for key, entry in call.items() if key not in ("function", "name", "arguments")}
        named = {**function, "arguments": arguments} if "function" in call else None
        plain = {"name": function["name"], "arguments": arguments}
        calls.append({"type": "function", **outer, "function": named or plain})
    return calls


def _sharegpt_turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"{where} holds {type_of(turn)}, not an object with from and value")
    speaker, value = turn.get("from"), turn.get("value")
    if speaker not in SHAREGPT_ROLES:
        raise BadRow(f"{where}.from is {speaker!r}; known are {', '.join(SHAREGPT_ROLES)}")
    marks = {key: turn[key] for key in ("train", "weight") if turn.get(key) is not None}
    if speaker == "function_call":
        calls = _json(value, f"{where}.value") if isinstance(value, str) else value
        calls = _tool_calls(calls if isinstance(calls, list) else [calls], where)
        return {"role": "assistant", "content": "", "tool_calls": calls, **marks}
    if not isinstance(value, str):
        raise BadRow(f"{where}.value is {type_of(value)}, not text")
    return {"role": SHAREGPT_ROLES[speaker], "content": value, **marks}


def _joined(parts: list[Any], where: str) -> str:
    """Join content given as parts, which must all be text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow(f"{where}.content has a part that is not text")
    return "".join(texts)  # type: ignore[arg-type]


def _list(value: Any, where: str, what: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, where)
    if not isinstance(value, list):
        raise BadRow(f"{where} holds {type_of(value)}, not a list of {what}")
    return value


def _object(value: Any, where: str, what: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _json(value, where)
    if not isinstance(value, dict):
        raise BadRow(f"{where} holds {type_of(value)}, not a {what}")
    return value


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRow(f"{where} is not valid JSON: {error}") from error
