"""`finetune prepare` on the faults that people report most: what is refused, what is dropped and counted,
what is learnt. Each of CASES is a file, the words of the command, and how it must end.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.cli import main
from tests.front_door import environment, finetune
from tests.unit.data.conftest import TEMPLATES, byte_tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
LONG = "pebble " * 60


def talk(*contents: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def pair(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


MOSS = talk("Name a colour of moss.", "Green.")
SYSTEM = {"messages": [{"role": "system", "content": "One word."}, *talk("Wet?", "Dry.")["messages"]]}
WHY = talk("2+2?", "[why]fingers[/why]4", "3+3?", "[why]threes[/why]6")
SPOKEN = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": None}]}


@dataclass(frozen=True)
class Case:
    content: str
    said: tuple[str, ...]
    code: int = 0
    learnt: list[list[str]] | None = None
    words: tuple[str, ...] = ()
    template: str = "markers"
    file: str = "a.jsonl"


def trained(content: str, *said: str, **more: Any) -> Case:
    return Case(content, said, 0, **more)


def refused(content: str, *said: str, **more: Any) -> Case:
    return Case(content, said, 2, **more)


GREEN = ["Green.<|im_end|>"]
PAIRS = [pair("p ", "c"), pair("q ", "d")]
LIMIT = "data.max_length=64"
BARE: dict[str, Any] = {"template": "none"}
CASES = {
    "chat": trained(lines(MOSS, SYSTEM), "loss on the answers", learnt=[GREEN, ["Dry.<|im_end|>"]]),
    "chat, no markers": trained(lines(MOSS), template="plain", learnt=[GREEN]),
    "chat, all": trained(lines(MOSS), "loss on every token", words=("data.loss_on=all",)),
    "chat, no template": refused(
        lines(MOSS), "no chat template", "'messages'", "model.chat_template", **BARE
    ),
    "rewritten history": refused(
        lines(WHY), "line 1: turn 2", "data.loss_on=last_assistant", template="rewrites"
    ),
    "rewritten history, last": trained(
        lines(WHY),
        template="rewrites",
        words=("data.loss_on=last_assistant",),
        learnt=[["[why]threes[/why]6<|im_end|>"]],
    ),
    "every prompt too long": refused(
        lines(pair(LONG, "x"), pair(LONG, "y")), LIMIT, "longest prompt 4", words=(LIMIT,), **BARE
    ),
    "one prompt too long": trained(
        lines(pair("q? ", "yes"), pair(LONG, "x"), pair("r? ", "no")),
        "dropped 1 of 3 rows",
        "line 2",
        words=(LIMIT,),
        learnt=[["yes<|endoftext|>"], ["no<|endoftext|>"]],
        **BARE,
    ),
    "one too long, strict": refused(
        lines(pair("q? ", "yes"), pair(LONG, "x")),
        "data.max_dropped=0",
        words=(LIMIT, "data.max_dropped=0"),
        **BARE,
    ),
    "answer too long": trained(
        lines(talk("Write.", LONG), MOSS), "dropped 1 of 2 rows", "limit 64", words=(LIMIT,), learnt=[GREEN]
    ),
    "answer cut": trained(
        lines(talk("Write.", LONG), MOSS), f"1 row cut to {LIMIT}", words=(LIMIT, "data.too_long=truncate")
    ),
    "malformed line": refused(
        lines(MOSS, MOSS, '{"messages": [{"role": "user"}', MOSS), "line 3: not valid JSON"
    ),
    "line is a list": refused(lines(MOSS, '["a", "list"]'), "line 2: a row must be a JSON object"),
    "rows under a field": refused(json.dumps({"data": PAIRS}), "Set `name: data`", file="a.json", **BARE),
    "rows under a field, named": trained(
        json.dumps({"data": PAIRS}), "2 of 2 rows", words=("data.train.0.name=data",), file="a.json", **BARE
    ),
    "top-level list": trained(json.dumps(PAIRS), "2 of 2 rows", file="a.json", **BARE),
    "unknown column": refused(
        lines({"body": "x"}), "found the columns body", "text: text", "columns: {text: body}", **BARE
    ),
    "unknown column, mapped": trained(
        lines({"body": "x"}),
        "text (text <- body)",
        words=("data.train.0.columns={text: body}",),
        learnt=[["x<|endoftext|>"]],
        **BARE,
    ),
    "wrong mapping": refused(
        lines({"body": "x"}),
        "the file has no column bdy",
        "It has: body",
        words=("data.train.0.columns={text: bdy}",),
        **BARE,
    ),
    "columns differ": refused(
        lines(PAIRS[0], {**PAIRS[0], "source": "s"}, {"prompt": "p "}),
        "line 3: column 'completion' is missing",
        **BARE,
    ),
    "null answer": refused(lines(MOSS, talk("say", None)), "line 2: messages[1].content is null"),
    "null in sharegpt": refused(lines(SPOKEN), "line 1: conversations[1].value is null"),
    "null text": refused(lines({"text": None}, {"text": "a"}), "line 1: column 'text' is null"),
    "blank texts": trained(
        lines({"text": ""}, {"text": "  "}, {"text": "a real one"}, {"text": "\n"}),
        "dropped 3 of 4 rows",
        "line 1",
        learnt=[["a real one<|endoftext|>"]],
    ),
    "empty completion": trained(
        lines(pair("p ", ""), pair("p ", "hi")), "dropped 1 of 2 rows", learnt=[["hi<|endoftext|>"]], **BARE
    ),
    "empty list of messages": refused(
        lines({"messages": []}, MOSS), "line 1: column 'messages' is an empty list"
    ),
    "no answer": trained(lines(talk("alone"), MOSS), "dropped 1 of 2 rows: no answer", learnt=[GREEN]),
    "no answer, all": trained(lines(talk("alone"), MOSS), "2 of 2 rows", words=("data.loss_on=all",)),
    "empty file": refused("", "a.jsonl: it holds no rows (0 bytes)"),
    "single row": trained(
        lines(MOSS), "1 an epoch (1 rows)", words=("trainer.per_device_train_batch_size=1",), learnt=[GREEN]
    ),
    "csv keeps words": trained(
        'prompt,completion\n"q ",null\n"q ",NA\n"q ",None\n"q ",four\n',
        "4 of 4 rows",
        learnt=[[f"{word}<|endoftext|>"] for word in ("null", "NA", "None", "four")],
        file="a.csv",
        **BARE,
    ),
    "one bos": trained(lines(MOSS), template="bos", learnt=[GREEN]),
    "stream without steps": refused(
        lines(MOSS), "a stream has no known length", "trainer.max_steps", words=("data.streaming=true",)
    ),
    "stream": trained(lines(*[MOSS] * 4), "3 in all", words=("data.streaming=true", "trainer.max_steps=3")),
    "wrong path": refused(
        lines(MOSS), "there is no file or folder", words=("data.train.0.path=absent.jsonl",)
    ),
}
ARCHIVED = {
    f"{name}, archived": case for name, case in CASES.items() if case.file == "a.jsonl" and case.content
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(template: str) -> Path:
        if template not in made:
            at = made[template] = tmp_path_factory.mktemp(template)
            specials = [*SPECIALS, "<s>"]
            byte_tokenizer(TEMPLATES[template], specials, bos="<s>", eos=SPECIALS[0]).save_pretrained(at)
            (at / "config.json").write_text(json.dumps({"vocab_size": 400, "max_position_embeddings": 512}))
        return made[template]

    return make


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def prepare(
    model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Ended]:
    """`finetune prepare` with a template's model, in the test's own folder and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))

    def run(template: str, *words: str) -> Ended:
        code = main(["prepare", f"model.name_or_path={model(template)}", *words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("name", [*CASES, *ARCHIVED])
def test_reported_faults_end_as_they_should(name: str, prepare: Callable[..., Ended], tmp_path: Path) -> None:
    case = {**CASES, **ARCHIVED}[name]
    file, content = (case.file, case.content.encode())
    if name in ARCHIVED:
        file, content = f"{file}.gz", gzip.compress(content)
    Path(file).write_bytes(content)
    printed = prepare(case.template, f"data.train=[{{path: {file}}}]", *case.words, "--json")
    assert printed.code == case.code, printed.err
    answer = json.loads(printed.out)
    for part in case.said:
        assert part in printed.err, printed.err
    if case.code:
        assert "Traceback" not in printed.err
        assert not list((tmp_path / "cache").rglob("*.arrow"))
        assert not (tmp_path / "runs").exists()
        return
    samples = answer["train"]["samples"]
    if case.learnt is not None:
        assert [sample["supervised_text"] for sample in samples] == case.learnt
    for sample in samples:
        assert sample["text"].count("<s>") == (case.template == "bos")
        assert "".join(piece["text"] for piece in sample["pieces"]) == sample["text"]
    train = answer["train"]
    assert train["rows_read"] == train["rows_used"] + sum(train["dropped"].values()) + train["not_drawn"]


def test_files_of_two_formats_are_refused_with_both_named(prepare: Callable[..., Ended]) -> None:
    Path("shard_a.jsonl").write_text(lines(pair("p1 ", "c1")))
    Path("shard_b.jsonl").write_text(lines({"instruction": "i1", "output": "o1"}))
    for sources in ("[{path: shard_*.jsonl}]", "[{path: shard_a.jsonl}, {path: shard_b.jsonl}]"):
        refusal = prepare("none", f"data.train={sources}")
        assert refusal.code == 2
        assert "shard_a.jsonl has the columns prompt, completion" in refusal.err
        assert "shard_b.jsonl has the columns instruction, output" in refusal.err


def test_integers_in_a_text_column_are_refused_with_column_and_type(prepare: Callable[..., Ended]) -> None:
    table = pyarrow.table({"prompt": ["two plus two? "], "completion": [4]})
    pyarrow.parquet.write_table(table, "wrong.parquet")
    refusal = prepare("none", "data.train=[{path: wrong.parquet}]")
    assert refusal.code == 2
    assert "wrong.parquet row 1: column 'completion' holds int, not text" in refusal.err


def test_prepare_shows_what_is_learnt_and_any_machine_can_do_it(tmp_path: Path) -> None:
    """A real process with the embedded model and rows; then the same from the cache, without the big ones."""
    words = ["prepare", "recipe=tiny_lora", "data.eval_fraction=0.1"]
    env = {"FINETUNE_CACHE": str(tmp_path / "cache"), "COLUMNS": "80"}
    first = finetune(*words, "--debug", at=tmp_path, **env)
    assert first.code == 0, first.err
    for part in ("rows by length in tokens", "longest rows in tokens", "{+", "steps ", "loss on the answers"):
        assert part in first.out
    page = Path(first.out.split("page ")[-1].strip()).read_text(encoding="utf-8")
    assert "<mark>" in page
    assert "written to the cache" in first.out
    script = "import sys; from finetune.cli import main; code = main(sys.argv[1:])\n"
    script += "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules); assert not heavy, heavy\n"
    again = subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(code)", *words, "--json"],
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert answer["train"]["cache"] == answer["eval"]["cache"] == "hit"
    assert answer["steps"]["total"] > 0
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cache"]
    unmarked = ["model=qwen8b", f"model.name_or_path={tmp_path / 'absent'}"]
    told = finetune("prepare", *unmarked, "data.max_length=10000000", "--json", at=tmp_path, **env)
    assert told.code == 2
    assert "no GPU" not in told.err


def test_output_that_nobody_reads_and_functions_that_print_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("def f(row):\n    print('noise')\n    return {'text': row['q']}\n")
    (tmp_path / "rows.jsonl").write_text(lines({"q": "a"}))
    words = ["prepare", "model=tiny", "data.train=[{path: rows.jsonl, format: 'loud:f'}]"]
    env = {"FINETUNE_CACHE": str(tmp_path / "cache")}
    outcome = finetune(*words, "--json", at=tmp_path, **env)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["train"]["rows_used"] == 1
    assert "noise" in outcome.err
    piped = subprocess.Popen(
        [sys.executable, "-m", "finetune", *words],
        cwd=tmp_path,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert piped.stdout is not None
    piped.stdout.close()
    _, told = piped.communicate(timeout=60)
    assert piped.returncode == 141
    assert b"Traceback" not in told


def test_samples_cannot_move_the_cursor_or_fake_what_is_learnt(
    prepare: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    Path("a.jsonl").write_text(lines(talk("q \x1b[2J", "a \x1b[0m b")))
    shown = prepare("markers", "data.train=[{path: a.jsonl}]")
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert "\\x1b[2J" in shown.out
