"""The Python API in a script: the numbers of the files and of the command line, and what is shown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.inference.answers import Answer, Answers
from finetune.inference.evaluation import Evaluation
from finetune.logs import NOISE
from finetune.paths import embedded
from tests.front_door import environment
from tests.front_door import finetune as command

SCRIPT = """
import json, sys
import finetune
run = finetune.train(*json.loads(sys.argv[1]), say=lambda line: print(line, flush=True))
there = [name for name in ("torch", "matplotlib", "IPython") if name in sys.modules]
print(json.dumps({"path": str(run.path), "there": there, "shown": repr(run)}))
"""
ASKS = """
import gc, json, logging, os, sys, warnings
import finetune
from finetune.logs import LIBRARIES
def generate():
    finetune.generate(None, "What is 7 plus 5?", "model=tiny", temperature=0, max_new_tokens=3)
def evaluate():
    finetune.evaluate(None, "model=tiny", f"data.eval={sys.argv[1]}", samples=1, max_new_tokens=3)
def state():
    from transformers import PreTrainedModel
    from transformers.utils.logging import is_progress_bar_enabled
    heard = [logging.lastResort]
    for logger in map(logging.getLogger, ("finetune", *LIBRARIES)):
        heard += [logger, *logger.handlers]
    return {
        "models": sum(issubclass(type(one), PreTrainedModel) for one in gc.get_objects()),
        "loggers": [[str(one), one.level, len(one.filters)] for one in heard],
        "warnings": list(map(str, warnings.filters)),
        "environment": dict(os.environ),
        "bars": is_progress_bar_enabled(),
    }
for ask in (generate, evaluate):
    ask()  # what libraries do where they are imported is theirs
gc.collect()
gc.disable()
print(json.dumps(state()))
for ask in (generate, evaluate):
    ask()
    print(json.dumps(state()))
"""
WORDS = [
    *("recipe=tiny_lora", "launch.device=cpu", "trainer.max_steps=12", "data.eval_fraction=0.1"),
    *("trainer.eval_strategy=steps", "trainer.eval_steps=6"),
]
HOSTILE = "<script>alert('&')</script>"
ESCAPED = "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a script that trained knows of its run."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([*WORDS, "run_name=run"])],
        cwd=tmp_path_factory.mktemp("trained"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def run(said: dict[str, Any]) -> finetune.Run:
    return finetune.Run.open(said["path"])


@pytest.fixture
def copy(said: dict[str, Any], tmp_path: Path) -> finetune.Run:
    """The records of the run, to be changed."""
    path = tmp_path / "copy"
    shutil.copytree(said["path"], path, ignore=shutil.ignore_patterns("checkpoints", "model"))
    return finetune.Run.open(path)


def test_a_plain_script_draws_nothing_and_touches_no_torch(said: dict[str, Any]) -> None:
    assert said["there"] == []
    assert said["shown"].startswith(f"Run {said['path']}: completed (lora, single, 1 process, fp32)\n")
    assert "12 steps, loss " in said["shown"]
    assert "(8 of 8 checks passed)" in said["shown"]


def test_a_run_is_opened_by_its_folder_or_a_checkpoint_and_nothing_else(run: finetune.Run) -> None:
    inside = finetune.Run.open(run.path / "checkpoints" / "checkpoint-12")
    assert inside.path == run.path
    assert Path(run) == run.path
    with pytest.raises(finetune.Refusal, match=r"it is no run's folder.*\n.*In it are: run"):
        finetune.Run.open(run.path.parent)
    with pytest.raises(finetune.Refusal, match="there is no such folder"):
        finetune.Run.open(run.path / "nowhere")


def test_metrics_and_answers_are_those_of_the_files(run: finetune.Run) -> None:
    logged = [json.loads(line) for line in run.dir.metrics.read_text(encoding="utf-8").splitlines()]
    assert run.metrics["loss"].dropna().tolist() == [entry["loss"] for entry in logged if "loss" in entry]
    asked = [json.loads(line) for line in run.dir.samples.read_text(encoding="utf-8").splitlines()]
    assert {entry["step"] for entry in asked} == {0, 6, 12}
    assert len(run.samples) == 3
    for row in run.samples.itertuples():
        mine = {entry["step"]: entry["answer"] for entry in asked if entry["prompt"] == row.prompt}
        assert (row.before_step, row.before, row.after_step, row.after) == (0, mine[0], 12, mine[12])
    assert (run.samples["before"] != run.samples["after"]).any()


def test_a_half_written_line_is_not_read_and_a_value_nobody_logged_is_refused(copy: finetune.Run) -> None:
    before = len(copy.metrics)
    with copy.dir.metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "lo')
    assert len(copy.metrics) == before
    with pytest.raises(finetune.Refusal, match=r"accuracy: the run did not log it\n.*loss, grad_norm"):
        copy.plot("accuracy")


def test_the_page_is_made_anew_where_the_run_wrote_something_since(copy: finetune.Run) -> None:
    page = copy.page
    made = page.stat().st_mtime_ns
    assert copy.page.stat().st_mtime_ns == made
    os.utime(copy.dir.metrics, ns=(made + 1, made + 1))
    assert copy.page.stat().st_mtime_ns > made
    page.unlink()
    assert copy.page.exists()


def test_a_comparison_has_the_very_numbers_of_the_report_and_of_the_metrics(
    run: finetune.Run, copy: finetune.Run
) -> None:
    lines = copy.dir.metrics.read_text(encoding="utf-8").splitlines()
    changed = [
        {**entry, "loss": entry["loss"] / 3} if "loss" in entry else entry for entry in map(json.loads, lines)
    ]
    copy.dir.metrics.write_text("".join(f"{json.dumps(entry)}\n" for entry in changed), encoding="utf-8")
    copy.dir.report.unlink()
    comparison = finetune.compare(run, copy.path)
    out = command("report", str(run.path), str(copy.path), "--json", at=copy.path.parent).out
    reported = json.loads(out)
    assert comparison.record["runs"] == reported["runs"]
    assert comparison.record["differing_keys"] == reported["differing_keys"]
    for one in reported["runs"]:
        row = comparison.table.loc[one["name"]]
        known = {name: value for name, value in one["results"].items() if value is not None}
        assert {name: row[name] for name in known} == known
    assert comparison.table.loc["copy", "final_loss"] == copy.metrics["loss"].dropna().iloc[-1]
    drawn = {line.get_label(): line.get_ydata().tolist() for line in comparison.plot("loss").get_lines()}
    assert drawn == {one.path.name: one.metrics["loss"].dropna().tolist() for one in (run, copy)}
    assert f"{comparison.table.loc['copy', 'final_loss']:.4f}" in comparison._repr_html_()
    with pytest.raises(
        finetune.Refusal, match=r"nothing_such: none of the runs logged it\n.*loss, eval_loss"
    ):
        comparison.plot("nothing_such")
    with pytest.raises(finetune.Refusal, match="two runs or more are compared"):
        finetune.compare(run)


def test_prepared_data_has_the_numbers_of_the_command_and_its_learnt_text_marked(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"No {HOSTILE}"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps({'messages': chat})}\n" * 4, encoding="utf-8")
    words = ["recipe=tiny_lora", f"data.train=[{{path: {file}}}]"]
    data = finetune.prepare(*words)
    reported = json.loads(command("prepare", *words, "--json", at=tmp_path).out)
    assert {**data.statistics["train"], "cache": ""} == {**reported["train"], "cache": ""}
    assert data.statistics["steps"] == reported["steps"]
    assert data.table.loc["train", "supervised_tokens"] == reported["train"]["supervised_tokens"]
    shown = data._repr_html_()
    assert f"<mark>No {ESCAPED}&lt;|im_end|&gt;</mark>" in shown
    assert HOSTILE not in shown
    assert f"{{+No {HOSTILE}" in repr(data).replace("\n  | ", "")
    assert data.page.exists()


def test_a_run_answers_and_is_measured_as_by_the_command_line(run: finetune.Run) -> None:
    questions = ["What is the opposite of big?", "What is 7 plus 5?"]
    answers = run.generate(questions, compare=True, temperature=0, max_new_tokens=30)
    assert [answer.model for answer in answers] == ["base", "tuned"] * 2
    assert answers.table["prompt"].tolist() == questions
    file = run.path.parent / "prompts.txt"
    file.write_text("\n".join(questions), encoding="utf-8")
    words = [
        str(run.path),
        "--prompts",
        str(file),
        "--compare",
        "--temperature",
        "0",
        "--max-new-tokens",
        "30",
    ]
    out = command("generate", *words, "--json", at=run.path.parent).out
    told = [one["text"] for line in out.splitlines() for one in json.loads(line)["answers"]]
    assert [answer.text for answer in answers] == told
    assert answers == finetune.generate(
        run, questions, compare=True, temperature=0, max_new_tokens=30, say=lambda line: None
    )
    evaluation = run.evaluate(samples=0)
    tuned = evaluation.record["models"][1]
    assert tuned["loss"] == pytest.approx(run.report["eval_loss"], rel=1e-4)
    assert f"{tuned['loss']:.4f}" in evaluation._repr_html_()


def test_asking_leaves_a_notebooks_process_as_it_was() -> None:
    """Its memory, loggers, warnings and environment; and it is not told what libraries say to nobody."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(embedded("behaviour_eval.jsonl"))],
        env={name: value for name, value in environment().items() if name != "TOKENIZERS_PARALLELISM"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, *after = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert before["models"] == 0
    assert after == [before, before]
    assert not [noise for noise in NOISE if noise in done.stderr]


def test_no_display_lets_a_text_through_as_html(copy: finetune.Run) -> None:
    answers = Answers(
        [Answer(model, HOSTILE, f"{HOSTILE}\n{model}", 9, model == "base") for model in ("base", "tuned")]
    )
    assert answers._repr_html_().count(ESCAPED) == 3
    assert "[cut off after 9 tokens]" in repr(answers)
    sample = {"row": 0, "prompt": HOSTILE, "reference": HOSTILE, "answer": HOSTILE}
    model = {"name": "tuned", "loss": 1.0, "rows": 1, "unfinished": 0, "samples": [sample]}
    record = {"models": [model], "difference": None, "intervals": HOSTILE, "answered": None}
    assert Evaluation(record, {})._repr_html_().count(ESCAPED) == 4
    copy.dir.report.write_text(json.dumps({"status": HOSTILE, "error": HOSTILE}), encoding="utf-8")
    renamed = copy.path.rename(copy.path.with_name("<script>alert('&')<"))
    displays = [
        finetune.Run(renamed)._repr_html_(),
        finetune.compare(renamed, _second(renamed))._repr_html_(),
    ]
    for shown in displays:
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown


def _second(path: Path) -> Path:
    return shutil.copytree(path, path.with_name("second"))


def test_a_model_that_stands_where_the_run_does_is_told_its_place() -> None:
    with pytest.raises(finetune.Refusal, match=r"behind the run: \(None, 'model=tiny'\)"):
        finetune.evaluate("model=tiny", "data.eval=rows.jsonl")
