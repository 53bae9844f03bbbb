"""docs/coming_from.md is true: names of TRL are the installed ones, and every key of ours composes."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from finetune.config.compose import compose
from finetune.config.trainer_fields import sft_fields
from finetune.config.trainer_keys import OWNED_ELSEWHERE
from finetune.errors import Problem
from finetune.words import VERBS, split_words

COMING = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: what it is called elsewhere, and here."""

    head: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


def rows() -> Iterator[Row]:
    head = ""
    for line in COMING.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or line.startswith("|---"):
            head = head if line.startswith("|") else ""
        elif not head:
            head = cells[0].strip()
        else:
            theirs, ours = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells)
            yield Row(head, theirs, ours)


def test_every_key_of_ours_beside_one_of_theirs_composes() -> None:
    together: list[dict[str, str]] = []
    for row in rows():
        words = {word.partition("=")[0]: word for word in row.ours if re.match(r"[a-z_.]+=", word)}
        free = next((one for one in together if not {*one} & {*words}), None)
        if free is None:
            together.append(free := {})
        free |= words
    assert sum(map(len, together)) > 100
    for words in together:
        found: list[Problem] = []
        typed = [f"{key}={shlex.split(word.partition('=')[2])[0]}" for key, word in words.items()]
        compose(["model=tiny", *typed], problems=found)
        assert [str(problem) for problem in found if "data.train is missing" not in str(problem)] == []


def test_a_right_side_without_a_key_is_a_verb_or_says_that_nothing_is_needed() -> None:
    for row in rows():
        if row.head == "their command":
            assert split_words(list(row.ours[0].split())).verb in VERBS
            assert row.ours[0].split()[0] in VERBS
    text = COMING.read_text(encoding="utf-8")
    for line in re.findall(r"^\| `.* \|$", text, flags=re.MULTILINE):
        ours = line.rstrip(" |").split(" | ")[1]
        if ours == "here":
            continue
        assert re.search(r"`[a-z_.]+=|^nothing: |^`(train|prepare|merge|generate|evaluate)", ours), line


def test_names_of_trl_are_those_of_the_installed_version() -> None:
    script = fields_of("trl", "trainer/model_config.py") | fields_of("trl", "scripts/utils.py")
    for row in rows():
        if row.head == "SFTConfig":
            aliases = {"gradient_checkpointing"}
            assert set(row.theirs) <= {*sft_fields(), *aliases}, row
            assert {*row.theirs} <= {*OWNED_ELSEWHERE, *aliases}, f"{row.theirs} is a key of trainer itself"
        elif row.head == "`trl sft`":
            assert set(row.theirs) <= script, row


def fields_of(package: str, file: str) -> set[str]:
    """The annotated names in the classes of a library's module, read without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    lines = [line for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}
