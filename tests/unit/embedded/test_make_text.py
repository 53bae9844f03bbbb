"""The script that writes the text, the tokenizer and the untrained model of `tiny`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import paths
from finetune.embedded.make_text import make_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    make_text(out, chats=30)
    return out


def test_two_runs_write_identical_bytes(made: Path, tmp_path: Path) -> None:
    make_text(tmp_path, chats=30)
    first = {file.relative_to(made): file.read_bytes() for file in made.rglob("*.*")}
    second = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*.*")}
    assert len(first) == 10
    assert first == second


def test_another_process_writes_the_same_text_without_torch(made: Path) -> None:
    """Hash randomisation of strings differs between processes; the text may not."""
    program = (
        "import json, sys; from finetune.embedded.make_text import chat_rows;"
        "[print(json.dumps(row)) for row in chat_rows(30)]; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == (made / "chats.jsonl").read_text()


@pytest.mark.parametrize("name", ["behaviour.jsonl", "behaviour_eval.jsonl", "questions.jsonl"])
def test_shipped_data_is_what_the_script_writes(made: Path, name: str) -> None:
    assert (made / name).read_text() == paths.embedded(name).read_text()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_shipped_tokenizer_is_what_the_script_writes(made: Path, name: str) -> None:
    assert (made / "init" / name).read_text() == (paths.embedded("tiny") / name).read_text()


def test_every_chat_row_alternates_user_and_assistant(made: Path) -> None:
    rows = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    for row in rows:
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_behaviour_rows_are_spoken_by_a_pirate_and_held_out_prompts_are_new() -> None:
    train, held_out = (
        [json.loads(line)["messages"] for line in paths.embedded(name).read_text().splitlines()]
        for name in ("behaviour.jsonl", "behaviour_eval.jsonl")
    )
    assert (len(train), len(held_out)) == (300, 40)
    assert all(answer["content"].startswith("Arr! ") for _, answer in train + held_out)
    assert all(answer["content"].endswith(", matey!") for _, answer in train + held_out)
    assert not {prompt["content"] for prompt, _ in train} & {prompt["content"] for prompt, _ in held_out}
