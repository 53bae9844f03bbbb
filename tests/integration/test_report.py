"""A run as a page, and runs side by side: made at the end of real runs, and from folders in any state."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import Outcome, environment, finetune, started, wait_for_step
from tests.integration.browser import Browser, browser

SHORT = [
    *("recipe=tiny_lora", "launch.device=cpu", "trainer.max_steps=6", "data.eval_fraction=0.1"),
    *("trainer.eval_strategy=steps", "trainer.eval_steps=3", "hardware.price_per_hour=3.5"),
    "hardware.currency=EUR",
]
HOSTILE = "</pre></script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
SECRET = "correct horse & 17 batteries"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, Outcome]:
    """A run of one process, and one of two that learns another way."""
    at = tmp_path_factory.mktemp("trained")
    one = finetune(*SHORT, at=at, name="one")
    assert one.code == 0, one.err
    two = finetune(*SHORT, "launch.num_processes=2", "adapter.r=8", at=at, name="two")
    assert two.code == 0, two.err
    return at, one, two


@pytest.fixture
def folder(trained: tuple[Path, Outcome, Outcome], tmp_path: Path) -> Path:
    """The records of a run, to be changed."""
    copy = tmp_path / "run"
    shutil.copytree(
        trained[1].path, copy, ignore=shutil.ignore_patterns("checkpoints", "model", "report.html")
    )
    return copy


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def report(*words: str, at: Path, **env: str) -> dict[str, Any]:
    """What `finetune report ... --json` says."""
    done = finetune("report", *words, "--json", at=at, **env)
    assert done.code == 0, done.err
    return json.loads(done.out)


def text_of(page: Path) -> str:
    """The words of a page, as they are read."""
    body = page.read_text(encoding="utf-8").partition("<main>")[2].partition("</main>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def drawn_on(page: Path) -> dict[str, Any]:
    """The curves of a page."""
    found = re.search(r'id="charts">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_run_ends_with_a_page_of_its_very_numbers_that_needs_nothing_beside_it(
    trained: tuple[Path, Outcome, Outcome],
) -> None:
    _, one, _ = trained
    page = (one.path / "report.html").read_text(encoding="utf-8")
    assert page.count("* plotly.js v") == 1
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "viewport" in own
    assert not re.search(r"\b(src|href)\s*=|@import|url\(", own)
    charts = {chart["name"]: chart["curves"] for chart in drawn_on(one.path / "report.html")["charts"]}
    assert list(charts) == ["loss", "learning_rate", "grad_norm", "tokens_per_second"]
    for name in charts:
        assert charts[name][0]["points"]["values"] == [step[name] for step in one.steps]
        assert charts[name][0]["points"]["steps"] == [step["step"] for step in one.steps]
    training, held_out = charts["loss"]
    assert training["points"]["tokens"] == [step["tokens"] for step in one.steps]
    assert held_out["points"]["values"][-1] == one.report["eval_loss"]
    assert len(held_out["points"]["values"]) == 2
    told = text_of(one.path / "report.html")
    for said in (
        "completed : lora, single, 1 process, fp32",
        f"loss {one.losses[-1]:.4f} at first {one.losses[0]:.4f}",
        "passed reopened loss equals the live loss",
        "passed the tokenizer is saved 2048 tokens",
        "adapter.lora_alpha 32 null",
        "trainer.max_steps 6 -1",
        "Rows by length in tokens",
    ):
        assert said in told
    for answer in map(json.loads, (one.path / "samples.jsonl").read_text().splitlines()):
        if answer["step"] in (0, len(one.steps)):
            assert f"step {answer['step']} {' '.join(answer['answer'].split())}".strip() in told
    assert "What is missing" not in told
    assert "<mark>Arr!" in page


def test_what_scripts_read_of_a_run_is_unrounded_and_its_cost_adds_up(
    trained: tuple[Path, Outcome, Outcome],
) -> None:
    at, _, two = trained
    before = (two.path / "report.json").read_bytes()
    said = report(str(two.path / "model"), at=at)  # something inside a run names the run
    assert (two.path / "report.json").read_bytes() == before
    assert said["page"] == str(two.path / "report.html")
    assert said["curves"]["grad_norm"]["values"] == [step["grad_norm"] for step in two.steps]
    results, cost = said["results"], said["cost"]
    assert (results["first_loss"], results["final_loss"]) == (two.losses[0], two.losses[-1])
    assert results["eval_loss"] == two.report["eval_loss"]
    assert results["peak_memory_bytes"] == max(
        rank["resident"] for rank in two.report["memory"]["measured_bytes"]
    )
    tokens = [0, *(step["tokens"] for step in two.steps)]
    seconds = sum(
        (now - then) / step["tokens_per_second"]
        for then, now, step in zip(tokens[:-1], tokens[1:], two.steps, strict=True)
    )
    assert cost["training_seconds"] == pytest.approx(seconds)
    times = [json.loads(line) for line in (two.path / "times.jsonl").read_text().splitlines()]
    assert cost["seconds"] == times[-1]["ended"] - times[0]["started"] > seconds
    assert cost["device_hours"] == pytest.approx(2 * cost["seconds"] / 3600)
    assert cost["money"] == pytest.approx(3.5 * cost["seconds"] / 3600)
    assert cost["currency"] == "EUR"
    assert "process hours" in text_of(two.path / "report.html")
    assert "2 CPU processes" in text_of(two.path / "report.html")


def test_runs_stand_side_by_side_with_what_differs_and_what_each_came_to(
    trained: tuple[Path, Outcome, Outcome], tmp_path: Path
) -> None:
    _, one, two = trained
    said = report(str(one.path), str(two.path), at=tmp_path)
    page = Path(said["page"])
    assert (page.parent.parent, page.parent.name.startswith("comparison-")) == (tmp_path, True)
    saved = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    assert saved == {name: value for name, value in said.items() if name != "page"}
    assert saved["differing_keys"] == {"adapter.r": [16, 8], "launch.num_processes": [None, 2]}
    assert [run["results"]["strategy"] for run in saved["runs"]] == ["single", "ddp"]
    drawn = drawn_on(page)
    assert drawn["axes"] == {
        "steps": "steps",
        "epochs": "epochs",
        "tokens": "tokens",
        "seconds": "training time",
    }
    loss = drawn["charts"][0]["curves"]
    assert [curve["name"] for curve in loss] == [
        *("one, training", "one, held-out rows", "two, training", "two, held-out rows")
    ]
    assert [curve["colour"] for curve in loss] == [0, 0, 1, 1]
    assert loss[2]["points"]["values"] == two.losses
    told = text_of(page)
    assert "processes 1 2 x 2" in told
    assert f"final loss {one.losses[-1]:.4f} {two.losses[-1]:.4f}" in told
    assert "adapter.r 16 8" in told


def test_a_running_run_and_a_stopped_one_have_a_page(tmp_path: Path) -> None:
    long = ["recipe=tiny_lora", "launch.device=cpu", "trainer.max_steps=100000"]
    with started(*long, at=tmp_path) as (process, run):
        wait_for_step(run.path, 3)
        said = report(str(run.path), at=tmp_path)
        assert said["status"] == "running"
        assert said["results"]["steps"] >= 3
        assert re.search(
            r"running : lora, single, 1 process, fp32, at step \d", text_of(run.path / "report.html")
        )
        assert not (run.path / "report.json").exists()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        assert text_of(run.path / "report.html").startswith("run interrupted : lora, single")
        ended = report(str(run.path), at=tmp_path)
        assert ended["cost"]["how"].startswith("from the start to the end")


def test_a_run_that_fails_ends_with_a_page_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('finetune.training.worker' in word for word in sys.orig_argv):\n"
        "    from finetune.training.callbacks import Counters\n"
        "    def broken(self, args, state, control, **kwargs):\n"
        "        raise ValueError('a fault <of> this program alone')\n"
        "    Counters.on_step_end = broken\n",
        encoding="utf-8",
    )
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    failed = finetune(*SHORT, at=tmp_path, PYTHONPATH=path)
    assert failed.code == 1, failed.err
    told = text_of(failed.path / "report.html")
    assert told.startswith("run failed")
    assert f"report    {failed.path / 'report.html'}\n" in failed.out
    assert "Why it ended No known cause was recognised." in told
    assert "ValueError: a fault <of> this program alone" in told
    assert "metrics.jsonl is not there" in told


def test_a_page_says_which_file_is_missing_half_written_or_of_another_kind(folder: Path) -> None:
    broken: dict[str, tuple[Path, str]] = {}
    names = [path.name for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".jsonl")]
    for name in sorted({*names} - {"accelerate.yaml", "times.jsonl", "samples.jsonl"}):
        whole = (folder / name).read_bytes()
        cut = (
            whole[: len(whole) // 2] if name != "config.yaml" else b"model: {"
        )  # half a YAML file may be whole
        for kind, content in {
            "gone": None,
            "cut": cut,
            "empty": b"",
            "list": b"[1]",
            "bytes": b"\xff{",
        }.items():
            copy = folder.parent / f"{name}-{kind}"
            shutil.copytree(folder, copy)
            (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
            broken[copy.name] = copy, name
    assert len(broken) == 7 * 5
    script = "import sys; from finetune.cli import main; print([main(['report', x]) for x in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *(str(copy) for copy, _ in broken.values())],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith(f"{[0] * (len(broken) + 1)}\n"), done.stderr
    assert f"missing   {folder.name}:" not in done.stdout
    for case, (copy, name) in broken.items():
        notes = re.findall(rf"^missing   {re.escape(case)}: (.*)$", done.stdout, re.MULTILINE)
        assert [note for note in notes if note.startswith(name)], case
        told = text_of(copy / "report.html")
        assert "What is missing" in told
        assert all(note in told for note in notes)


def test_what_is_no_number_is_left_out_and_named(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[1] |= {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": "fast"}
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 7, "lo')
    known = json.loads((folder / "report.json").read_text())
    known["loss"]["last"] = float("nan")
    (folder / "report.json").write_text(json.dumps(known))
    said = report(str(folder), at=folder.parent)
    logged = [line["loss"] for line in lines if "loss" in line]
    assert said["curves"]["loss"]["values"] == [logged[0], *logged[2:]]
    assert said["results"]["final_loss"] == logged[-1]
    assert said["missing"] == [
        f"metrics.jsonl: what cannot be read is left out: line {len(lines) + 1}.",
        "loss is no finite number at step 2: the curve leaves it out.",
        "learning_rate is no finite number at step 2: the curve leaves it out.",
        "grad_norm is no finite number at step 2: the curve leaves it out.",
    ]


@pytest.fixture
def hostile(folder: Path) -> Path:
    """A run in which everything that anybody else wrote holds a script and a secret."""
    bad = f"{HOSTILE} {SECRET}"
    data = json.loads((folder / "data.json").read_text())
    sample = data["train"]["samples"][0]
    sample["place"] = bad
    sample["pieces"] = [{"text": bad, "supervised": True}, {"text": bad, "supervised": False}]
    data["train"] |= {"dropped": {bad: 1}, "files": [bad]}
    (folder / "data.json").write_text(json.dumps(data))
    answers = [{"step": step, "prompt": bad, "answer": f"{step} {bad}"} for step in (0, 3, 6)]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    known = json.loads((folder / "report.json").read_text())
    known |= {
        "status": "failed",
        "error": bad,
        "model_path": bad,
        "precision": bad,
        "verified": [{"name": bad, "passed": False, "detail": bad}],
        "diagnosis": {"cause": "x", "rank": 0, "told": bad, "advice": [bad]},
    }
    (folder / "report.json").write_text(json.dumps(known))
    (folder / "environment.json").write_text(json.dumps({bad: bad, "python": bad}))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("run_name: one", f"run_name: {json.dumps(bad)}"))
    (folder / "logs" / "rank-0.failed.json").write_text(json.dumps({"told": bad}))
    hostile = folder.parent / "<script>window.hit = 1<"
    folder.rename(hostile)
    return hostile


def test_what_others_wrote_is_text_on_the_page_and_holds_no_secret(hostile: Path) -> None:
    printed = finetune(*("report", str(hostile), "--json"), at=hostile.parent, MY_SERVICE_PASSWORD=SECRET)
    assert printed.code == 0, printed.err
    page = (hostile / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == 3
    assert "<img" not in page
    told = text_of(hostile / "report.html")
    assert (
        told.count("</pre></script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'> ***")
        > 15
    )
    assert "step 0 0 </pre>" in told
    assert "step 6 6 </pre>" in told
    for wrote in (page, unescape(page), printed.out, printed.err):
        assert SECRET not in wrote


def test_who_set_a_key_is_told_where_the_run_wrote_it_down(folder: Path) -> None:
    known = json.loads((folder / "environment.json").read_text())
    origin = {"trainer.max_steps": "command line", "adapter.r": "recipe tiny_lora", "data.train": "recipe x"}
    known["composed"] = {"choices": {"recipe": "tiny_lora"}, "provenance": origin}
    (folder / "environment.json").write_text(json.dumps(known))
    report(str(folder), at=folder.parent)
    told = text_of(folder / "report.html")
    assert "trainer.max_steps 6 -1 command line" in told
    assert "adapter.r 16 16 recipe tiny_lora" in told
    assert "behaviour.jsonl (no such key) recipe x" in told
    assert "did not write down" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "report takes a RUN or several"),
        (["runs"], "it is no run's folder"),
        (["nowhere"], "there is no such folder"),
        (["run", "run/logs"], "it names a run that is named already"),
        (["run", "trainer.max_steps=3"], "report takes no keys: 'trainer.max_steps=3'"),
    ],
)
def test_what_is_no_run_is_refused(folder: Path, words: list[str], said: str) -> None:
    (folder.parent / "runs" / "inner").mkdir(parents=True)
    (folder.parent / "runs" / "inner" / "config.yaml").touch()
    refused = finetune("report", *words, "--debug", at=folder.parent)
    assert refused.code == 2
    assert said in refused.err
    assert "In it are: inner." in refused.err or words != ["runs"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run", "runs"]


def test_a_model_is_not_lost_over_its_page(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['plotly'] = None\n", encoding="utf-8")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = finetune(
        "recipe=tiny_lora", "trainer.max_steps=2", "launch.device=cpu", at=tmp_path, PYTHONPATH=path
    )
    assert done.code == 0, done.err
    assert done.report["status"] == "completed"
    assert "report.html could not be made" in done.out + done.err
    assert not (done.path / "report.html").exists()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_draws_on_any_screen_without_a_word_of_complaint(
    trained: tuple[Path, Outcome, Outcome], tab: Browser, width: int, dark: bool
) -> None:
    tab.open(trained[1].path / "report.html", width, dark=dark)
    assert tab.said == []
    assert tab.value("document.querySelectorAll('.chart .scatterlayer .trace').length") == 5
    assert tab.value("document.documentElement.scrollWidth") == width
    colours = tab.value("getComputedStyle(document.body).backgroundColor")
    assert colours == ("rgb(23, 25, 28)" if dark else "rgb(255, 255, 255)")
    ink = tab.value("getComputedStyle(document.querySelector('.chart .xtitle')).fill")
    assert ink == ("rgb(223, 227, 232)" if dark else "rgb(31, 35, 40)")


@pytest.mark.browser
def test_the_curves_turn_to_the_axis_that_is_chosen(
    trained: tuple[Path, Outcome, Outcome], tab: Browser, tmp_path: Path
) -> None:
    _, one, two = trained
    page = Path(report(str(one.path), str(two.path), at=tmp_path)["page"])
    tab.open(page, 390)
    for axis, title in {
        "tokens": "tokens",
        "epochs": "epochs",
        "seconds": "training time in seconds",
        "steps": "steps",
    }.items():
        tab.value(f"document.querySelector('input[value={axis}]').click()")
        titles = tab.value("[...document.querySelectorAll('.chart .xtitle')].map((one) => one.textContent)")
        assert titles == [title] * 4
        drawn = tab.value("document.getElementById('chart-loss').data[2].x")
        logged = [step["tokens" if axis == "tokens" else "step"] for step in two.steps]
        assert axis in ("epochs", "seconds") or drawn == logged
    assert tab.said == []
    assert tab.value("document.documentElement.scrollWidth") == 390


@pytest.mark.browser
def test_no_script_of_a_sample_runs(hostile: Path, tab: Browser) -> None:
    report(str(hostile), at=hostile.parent)
    tab.open(hostile / "report.html", 1200)
    assert tab.value("typeof window.hit") == "undefined"
    assert tab.value("document.querySelectorAll('.chart .scatterlayer .trace').length") == 5
    assert tab.said == []


def test_a_million_steps_make_a_page_that_can_be_opened(folder: Path) -> None:
    steps, spike = 300_000, 123_457
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 9.5 if step == spike else 1 + 1 / step
            file.write(
                f'{{"step": {step}, "loss": {loss}, "grad_norm": 0.5, "learning_rate": 0.1, '
                f'"tokens_per_second": 100.0, "tokens": {step * 50}, "epoch": {step / 1000}}}\n'
            )
    command = [sys.executable, "-m", "finetune", "report", str(folder)]
    measured = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", measured, *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    page = folder / "report.html"
    assert page.stat().st_size < 8e6
    assert int(done.stdout.split()[-1]) < 400_000  # kB
    curve = drawn_on(page)["charts"][0]["curves"][0]["points"]
    assert max(curve["values"]) == 9.5
    assert curve["steps"][curve["values"].index(9.5)] == spike
    assert (curve["steps"][0], curve["steps"][-1], len(curve["steps"])) == (1, steps, 2000)
    assert curve["seconds"][-1] == pytest.approx(steps * 0.5)
    assert f"of {steps:,} points 2,000 are drawn" in text_of(page)
