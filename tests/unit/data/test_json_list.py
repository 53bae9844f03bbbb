"""A long JSON list is read item by item, whatever block it is cut into, and refused with the right line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from finetune.data import json_list

VALUES: list[Any] = [{"a": "b, ] c", "n": [1, 2, {"x": None}]}, 1234567, "text \u00e9", [], True, -1.5e3, {}]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 4096])
@pytest.mark.parametrize("indent", [None, 1])
def test_any_block_size_gives_the_same_items(
    block: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "BLOCK", block)
    for values in (VALUES, VALUES[:1], [], VALUES * 20):
        text = json.dumps(values, indent=indent)
        assert list(json_list.items(io.StringIO(text))) == values
        assert list(json_list.items(io.StringIO(f"\ufeff\n {text} \n"))) == values


@pytest.mark.parametrize("block", [1, 5, 4096])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"a": 1},\n{"a": }]', 2),
        ('[{"a": 1}\n{"a": 2}]', 2),
        ('[{"a": 1},\n\n', 3),
        ('[\n{"a": "open', 2),
        ("[1]\n\n[2]", 3),
        ("[1,\n]", 2),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    text: str, line: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "BLOCK", block)
    with pytest.raises(json_list.NotJson) as told:
        list(json_list.items(io.StringIO(text)))
    assert told.value.line == line
