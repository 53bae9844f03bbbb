"""`finetune generate`: prompts, files, pipes and a terminal, against plain transformers."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.paths import embedded
from tests.front_door import environment

TINY = embedded("tiny")
QUESTIONS = embedded("questions.jsonl")
ASKED = [json.loads(line)["prompt"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the embedded model that changes what it says."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 1.0)
    tuned.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    shutil.copy(TINY / "generation_config.json", folder)
    return folder


GENERATES = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from finetune.cli import main
results = []
for words, stdin in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO(stdin)
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["generate", *words])
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def generations(
    *commands: list[str] | tuple[list[str], str], at: Path, code: int = 0
) -> list[tuple[str, str]]:
    """Run `finetune generate WORDS` for several lists of words (and what is typed) in one process."""
    pairs = [command if isinstance(command, tuple) else (command, "") for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", GENERATES, json.dumps(pairs)],
        cwd=at,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for (words, _), (ended, out, err) in zip(pairs, results, strict=True):
        assert ended == code, f"{words}: {out} {err}"
        assert "Traceback" not in err
    return [(out, err) for _, out, err in results]


def plain(conversations: list[list[dict[str, str]]], adapter: Path | None) -> list[str]:
    """Greedy answers, one at a time, with nothing of ours."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = (PeftModel.from_pretrained(model, adapter) if adapter is not None else model).eval()
    answers = []
    for turns in conversations:
        asked = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**asked, max_new_tokens=32, do_sample=False)
        text = tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.append(text.strip())
    return answers


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_of_prompts_is_answered_by_base_and_tuned_as_transformers_does(
    adapter: Path, tmp_path: Path
) -> None:
    words = [str(adapter), "--prompts", str(QUESTIONS), "--compare", "--json", "--max-new-tokens", "32"]
    ((out, _),) = generations(words, at=tmp_path)
    found = lines(out)
    assert [row["prompt"] for row in found] == ASKED
    conversations = [[user(text)] for text in ASKED]
    for place, (name, folder) in enumerate([("base", None), ("tuned", adapter)]):
        answers = [row["answers"][place] for row in found]
        assert {answer["model"] for answer in answers} == {name}
        assert [answer["text"] for answer in answers] == plain(conversations, folder)
    assert any(row["answers"][0]["text"] != row["answers"][1]["text"] for row in found)


def test_text_lines_and_conversations_are_prompts_too(adapter: Path, tmp_path: Path) -> None:
    turns = [user("What is 7 plus 5?"), {"role": "assistant", "content": "7 plus 5 is 12."}, user(ASKED[1])]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    (tmp_path / "asked.txt").write_text(f"{ASKED[0]}\n\n{ASKED[2]}\n", encoding="utf-8")
    words = [str(adapter), "--max-new-tokens", "32", "--prompts"]
    (rows, _), (told, _) = generations(
        [*words, "asked.jsonl", "--json"], [*words, "asked.txt", "--compare"], at=tmp_path
    )
    assert [row["answers"][0]["text"] for row in lines(rows)] == plain([turns], adapter)
    for text in (ASKED[0], ASKED[2]):
        assert f"> {text}" in told
    assert told.count("base") == told.count("tuned") == 2


def test_a_pipe_is_a_conversation(adapter: Path, tmp_path: Path) -> None:
    words = [str(adapter), "--max-new-tokens", "32"]
    said = f"{ASKED[2]}\n{ASKED[1]}\n/reset\n{ASKED[1]}\n"
    (told, _), (rows, _) = generations((words, said), ([*words, "--json"], f"{ASKED[2]}\n"), at=tmp_path)
    (first,) = plain([[user(ASKED[2])]], adapter)
    turns = [user(ASKED[2]), {"role": "assistant", "content": first}, user(ASKED[1])]
    assert told.splitlines() == [first, *plain([turns, [user(ASKED[1])]], adapter)]
    assert [answer["text"] for answer in lines(rows)[0]["answers"]] == [first]


def test_temperature_and_seed_decide_what_is_drawn(tmp_path: Path) -> None:
    words = ["model=tiny", "--prompt", "Tell me of Mia.", "--max-new-tokens", "24", "--temperature"]
    *drawn, greedy = generations(
        *([*words, "3", f"seed={seed}"] for seed in (1, 1, 2)), [*words, "0"], at=tmp_path
    )
    assert drawn[0][0] == drawn[1][0] != drawn[2][0]
    assert greedy[0].strip() == plain([[user("Tell me of Mia.")]], None)[0]


def test_what_is_wrong_is_told_without_a_traceback(adapter: Path, tmp_path: Path) -> None:
    rows = ['{"prompt": "a"}', "{broken", '{"question": "b"}', '{"prompt": ""}']
    rows.append(json.dumps({"messages": [user("a"), {"role": "assistant", "content": "b"}]}))
    (tmp_path / "bad.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("prompt\na\n", encoding="utf-8")
    folder = str(adapter)
    cases = [
        (
            [folder, "--prompts", "bad.jsonl"],
            ["4 problems", "line 2", "line 3", "line 4", "ends with an answer"],
        ),
        ([folder, "--prompts", "rows.csv"], [".jsonl"]),
        ([folder, "--prompts", "gone.txt"], ["cannot be read"]),
        ([folder, "--prompt", "a", "--prompts", "b.txt"], ["one of them"]),
        (["model=tiny", "--prompt", "a", "--compare"], ["--compare", "one model alone"]),
        ([folder, "--prompt", "a", "--temperature", "-1", "--bits", "5"], ["2 problems", "4 or 8"]),
        ([folder, "--prompt", "word " * 1100], ["1,024 positions"]),
        ([folder, "trainer.max_steps=3", "--prompt", "a"], ["nothing is trained here"]),
    ]
    found = generations(*(words for words, _ in cases), at=tmp_path, code=2)
    for (_, said), (out, err) in zip(cases, found, strict=True):
        assert all(text in err for text in said), err
        assert out == ""


def test_ctrl_c_stops_an_answer_and_ctrl_d_the_chat(tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(TINY, endless)
    model = AutoModelForCausalLM.from_pretrained(endless)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)  # it never comes to an end
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(endless)
    child, terminal = pty.fork()
    if child == 0:
        words = ["-m", "finetune", "generate", str(endless), "--max-new-tokens", "900", "--temperature", "1"]
        os.chdir(tmp_path)
        os.execvpe(sys.executable, [sys.executable, *words], environment())
    try:
        shown = read_until(terminal, "> ")
        assert "Ctrl-D ends" in shown
        os.write(terminal, b"Tell me more.\n")
        read_until(terminal, "Tell me more.")
        read_until(terminal, "", least=20)
        os.write(terminal, b"\x03")
        assert "[stopped]" in read_until(terminal, "> ")
        os.write(terminal, b"/reset\n")
        assert "forgotten" in read_until(terminal, "> ")
        os.write(terminal, b"\x04")
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal)


def read_until(terminal: int, wanted: str, least: int = 0, seconds: float = 120) -> str:
    """What appears, until it ends with `wanted` (or has `least` letters)."""
    shown, deadline = "", time.monotonic() + seconds
    while not (shown.endswith(wanted) or (wanted and wanted in shown)) or len(shown) < least:
        assert time.monotonic() < deadline, f"{wanted!r} never came: {shown!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
