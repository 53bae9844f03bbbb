"""A run's page says what its folder tells, from whichever of its files tells it, and no more than that."""

from __future__ import annotations

import fcntl
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from finetune.paths import RunDir
from finetune.report.cost import cost_of
from finetune.report.memory import memory_of
from finetune.report.page import run_page
from finetune.report.reading import read_run
from finetune.report.record import report_end
from finetune.report.results import results_of
from finetune.report.times import note_end, note_start

PLANNED = {"resident": {"expected": 80_000_000, "upper": 100_000_000}}
WORDS = "step 3: the loss is nan on rank 0.\n  Look at these rows."
RAISED = "Traceback (most recent call last):\n  ...\nValueError: a fault"


def step(number: int, *memory: float, speed: float = 50.0) -> dict[str, object]:
    return {
        **{"step": number, "loss": 2.0, "tokens": 100 * number, "tokens_per_second": speed},
        **{"supervised_tokens": 30 * number, "memory_resident_bytes": list(memory)},
    }


def folder(at: Path, *steps: dict[str, object], **records: object) -> Path:
    """A run's folder with these steps and records, `report` meaning report.json."""
    at.mkdir(exist_ok=True)
    (at / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in steps))
    for name, content in records.items():
        (at / f"{name}.json").write_text(json.dumps(content))
    return at


def words_of(at: Path) -> str:
    """What the page of this folder says; a tag leaves no space where it stands inside a word."""
    body = run_page(read_run(RunDir(at))).partition("<main>")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body.replace("<wbr>", ""))).split())


def results(at: Path) -> dict[str, Any]:
    reading = read_run(RunDir(at))
    return results_of(reading, cost_of(reading), memory_of(reading))


def test_a_run_without_a_result_has_the_tokens_and_the_memory_of_its_steps(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1, 70e6, 90e6), step(2, 75e6, 60e6), plan={"forecast": {"memory": PLANNED}})
    told = words_of(at)
    assert "learnt tokens 60 memory of a process 0.09 GB planned up to 0.10 GB" in told
    assert "0 0.07 GB 75%" in told
    assert "1 0.09 GB 90%" in told
    assert "How much each process took is not known" not in told


def test_a_plan_that_an_earlier_start_exceeded_stays_exceeded(tmp_path: Path) -> None:
    memory = {"planned_bytes": PLANNED, "measured_bytes": [{"resident": 90_000_000}]}
    at = folder(tmp_path, step(1, 120e6), step(2, 90e6), report={"status": "completed", "memory": memory})
    assert results(at)["peak_memory_bytes"] == 120e6
    assert "0 0.12 GB 120%" in words_of(at)


def starts(at: Path, *planned: object, behind: int = 1) -> None:
    """Of a run that went on again and again, each time behind this step, each start with its plan."""
    (at / "times.jsonl").unlink(missing_ok=True)
    for place, memory in enumerate(planned):
        note_start(RunDir(at), behind=behind if place else 0, planned=memory)


def test_no_share_of_a_plan_is_told_where_an_earlier_start_had_another(tmp_path: Path) -> None:
    memory = {"planned_bytes": PLANNED, "measured_bytes": [{"resident": 90_000_000}]}
    at = folder(tmp_path, step(1, 120e6, 110e6), step(2, 90e6), report={"memory": memory})
    for earlier in ({"resident": {"expected": 200_000_000, "upper": 300_000_000}}, None):
        starts(at, earlier, PLANNED)
        told = words_of(at)
        assert "0 0.12 GB 1 0.11 GB" in told
        assert "planned up to 0.10 GB for the last start" in told
        assert "An earlier start had another plan, so no share is told." in told


def test_a_share_is_told_where_all_steps_were_made_under_one_plan(tmp_path: Path) -> None:
    memory = {"planned_bytes": PLANNED, "measured_bytes": [{"resident": 90_000_000}]}
    at = folder(tmp_path, step(1, 120e6, 110e6), step(2, 90e6), report={"memory": memory})
    starts(at, PLANNED, PLANNED)
    assert "0 0.12 GB 120% 1 0.11 GB 110%" in words_of(at)
    starts(at, None, PLANNED, behind=0)  # nothing is left of what the first one did
    told = words_of(at)
    assert "0 0.12 GB 120% 1 0.11 GB 110%" in told
    assert "for the last start" not in told


def test_speed_and_seconds_of_a_step_are_those_that_the_run_reports_else_those_that_it_logged(
    tmp_path: Path,
) -> None:
    steps = [step(number, speed=speed) for number, speed in enumerate((5, 40, 50, 5, 60), start=1)]
    at = folder(tmp_path, *steps, {"step": 8, "eval_loss": 2.0})
    (at / "times.jsonl").write_text('{"started": 1}\n{"ended": 2}\n{"started": 3, "behind": 3}\n')
    found = results(at)
    assert (found["tokens_per_second"], found["step_seconds"]) == (50.0, 100 / 50)
    forecast = {
        "step_seconds": {"planned": 1.0, "measured": 1.5},
        "tokens_per_second": {"planned": 100.0, "measured": 60.0},
    }
    folder(tmp_path / "told", *steps, report={"forecast": forecast, "tokens_per_second": 60.0})
    found = results(tmp_path / "told")
    assert (found["tokens_per_second"], found["step_seconds"]) == (60.0, 1.5)
    assert "a step 1 s 1.5 s tokens per second 100 60" in words_of(tmp_path / "told")


def test_only_what_is_known_is_said_of_files_that_are_lost(tmp_path: Path) -> None:
    known = {"status": "completed", "steps": 57, "memory": {"planned_bytes": PLANNED}}
    at = folder(tmp_path, report=known)
    (at / "metrics.jsonl").unlink()
    (at / "config.yaml").write_text("seed: 1\noutput_dir: ru")
    told = words_of(at)
    assert "steps 57" in told
    assert "plan.json is not there." in told
    assert "metrics.jsonl is not there: the steps cannot be drawn." in told
    assert "config.yaml cannot be read, it may be half written: its last line has no end." in told
    assert "planned: 0.08 GB to 0.10 GB" in told
    assert not re.search("nothing was planned|no step was logged", told, re.IGNORECASE)


def test_a_plan_is_missed_unless_the_run_says_that_nothing_was_planned(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1), report={"memory": {"planned_bytes": None}})
    assert "plan.json" not in words_of(at)
    (at / "plan.json").write_text('{"fore')
    assert "plan.json cannot be read" in words_of(at)
    folder(at, step(1), report={"memory": {"planned_bytes": PLANNED}})
    (at / "plan.json").unlink()
    assert "plan.json is not there." in words_of(at)


@pytest.mark.parametrize(("content", "what"), [("", "nothing"), ("word\n", "no lines of the form")])
def test_a_config_without_keys_is_told_plainly(tmp_path: Path, content: str, what: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    assert f"config.yaml cannot be read, it may be half written: it holds {what}" in words_of(tmp_path)


@pytest.mark.parametrize(
    ("planned", "said"), [(None, "Nothing was planned."), ({}, "What was planned is not known.")]
)
def test_that_nothing_was_planned_is_said_where_the_run_says_it(
    tmp_path: Path, planned: object, said: str
) -> None:
    at = folder(tmp_path, step(1, 5e6), report={"memory": {"planned_bytes": planned}})
    assert f"The most that each process took (resident). {said} rank" in words_of(at)


def test_a_run_that_knew_why_it_ended_says_so_itself(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1), report={"status": "failed", "error": WORDS, "diagnosis": None})
    (at / "logs").mkdir()
    (at / "logs" / "rank-0.failed.json").write_text(json.dumps({"told": WORDS}))
    (at / "times.jsonl").write_text('{"started": 1}\n{"ended": 2}\n')
    told = words_of(at)
    assert f"Why it ended {' '.join(WORDS.split())} What is missing" in told
    assert "recognised" not in told
    assert "from the start to the end, loading" in told
    report_end(RunDir(at), "failed", RAISED)  # by a rank that failed later, under a launcher that is not ours
    own, raised = (" ".join(said.split()) for said in (WORDS, RAISED))
    assert f"Why it ended {own} In the words of the run {raised}" in words_of(at)
    alone = folder(tmp_path / "raised", step(1), report={"status": "failed", "error": RAISED})
    assert f"Why it ended No known cause was recognised. In the words of the run {raised}" in words_of(alone)


def test_a_run_that_has_ended_is_not_told_to_go_on_while_its_folder_is_held(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1), report={"status": "failed", "error": WORDS})
    (at / "times.jsonl").write_text('{"started": 1}\n{"ended": 2}\n')
    with RunDir(at).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(RunDir(at)).held
        assert "so far" not in words_of(at)


def test_a_run_is_running_until_its_last_start_has_ended_whatever_it_wrote_before(
    tmp_path: Path,
) -> None:
    at = folder(tmp_path, step(1), step(2), report={"status": "failed"})  # until its model is verified
    starts(at, PLANNED)
    assert read_run(RunDir(at)).status == "failed"  # nobody holds it: it was killed
    with RunDir(at).lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = words_of(at)
        assert f"{at.name} running : at step 2 " in told
        assert "from the start to the end so far, loading the model included" in told
        assert "No model was saved and checked yet." in told
        note_end(RunDir(at))
        assert f"{at.name} failed " in words_of(at)


def test_the_model_is_that_of_the_folder_that_is_read(tmp_path: Path) -> None:
    checks = [{"name": "all tensors are there", "passed": True, "detail": "84 tensors"}]
    at = folder(tmp_path, report={"model_path": "/old/place/model", "verified": checks})
    assert f"The saved model {at / 'model'} is not there." in words_of(at)
    (at / "model").mkdir()
    told = words_of(at)
    assert f"The saved model {at / 'model'} check found" in told
    assert "/old/place" not in told


@pytest.mark.parametrize(
    ("split", "said"),
    [(None, ""), ({"rows_used": 3}, "loss on held-out rows not evaluated ")],
)
def test_no_loss_is_asked_of_rows_that_were_not_held_out(tmp_path: Path, split: object, said: str) -> None:
    at = folder(tmp_path, step(1), data={"train": {}, "eval": split}, report={"status": "completed"})
    told = words_of(at)
    assert f"at first 2.0000 {said}tokens per second" in told


def test_figures_are_short_and_keys_break_between_their_words(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1), facts={"num_processes": 1})
    (at / "config.yaml").write_text("seed: 1\n")
    (at / "times.jsonl").write_text('{"started": 0}\n{"ended": 187.056}\n')
    assert "process hours 0.052 1 CPU process" in words_of(at)
    assert "hardware.<wbr>price_<wbr>per_<wbr>hour is not set" in run_page(read_run(RunDir(at)))


def test_one_answer_stands_alone_until_the_prompt_is_asked_again(tmp_path: Path) -> None:
    at = folder(tmp_path, step(1))
    first = {"step": 0, "prompt": "who?", "answer": "a pirate"}
    (at / "samples.jsonl").write_text(f"{json.dumps(first)}\n")
    told = words_of(at)
    assert "No evaluation came after these answers. who? step 0 a pirate Data" in told
    (at / "samples.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps({**first, 'step': 5})}\n")
    told = words_of(at)
    assert "who? step 0 a pirate step 5 a pirate Data" in told
    assert "No evaluation came" not in told
