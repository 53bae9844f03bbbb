"""What a user meets first: help, refusals, verbs that are not built, output for scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.cli import main
from tests.front_door import REPOSITORY, environment, finetune, wait_for

NOT_BUILT = ("fetch",)


def test_help_imports_no_heavy_library() -> None:
    script = (
        "import sys; from finetune.cli import main; assert main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'hydra', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m finetune" in done.stdout


def test_a_config_error_is_told_without_torch_and_before_anything_is_made(tmp_path: Path) -> None:
    script = (
        "import sys; from finetune.cli import main\n"
        "words = ['recipe=tiny_lora', 'trainer.max_stpes=3', 'adapter.r=0', 'trainer.global_batch_size=7']\n"
        "code = main(words)\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    for said in ("3 problems in recipe 'tiny_lora'", "trainer.max_steps", "adapter.r=0", "Nearest: 6 or 8"):
        assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_and_refusals_are_quick() -> None:
    """Far from the promised half second and two seconds, so that a busy machine does not fail the test."""
    started = time.monotonic()
    finetune("--help", at=REPOSITORY)
    helped = time.monotonic()
    finetune("recipe=tiny_lora", "trainer.max_stpes=3", at=REPOSITORY, name="never")
    assert helped - started < 2
    assert time.monotonic() - helped < 6


@pytest.mark.parametrize("verb", NOT_BUILT)
def test_a_verb_that_is_not_built_says_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    from finetune.cli import main

    assert main([verb, "recipe=tiny_lora"]) == 2
    assert f"finetune {verb} is not built yet" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["trian", "--jsn", "--multirun", "--json=1", "--quick=yes"])
def test_a_stray_word_or_flag_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from finetune.cli import main

    assert main([word, "recipe=tiny_lora"]) == 2
    assert word in capsys.readouterr().err


def test_a_dry_run_tells_the_arithmetic_and_makes_nothing(tmp_path: Path) -> None:
    words = [
        "recipe=tiny_lora",
        "launch.num_processes=2",
        "launch.device=cpu",
        "distributed=zero2",
        "--dry-run",
    ]
    done = finetune(*words, at=tmp_path)
    assert done.code == 0, done.err
    assert "global batch 16 = 2 per device x 2 processes x 4 accumulation" in done.out
    assert list(tmp_path.iterdir()) == []


def test_json_prints_one_object_and_the_run_repeats_from_its_config(tmp_path: Path) -> None:
    words = [
        "recipe=tiny_lora",
        "trainer.max_steps=3",
        "launch.device=cpu",
        f"output_dir={tmp_path / 'runs'}",
    ]
    command = [sys.executable, "-m", "finetune", *words, "run_name=first", "--json"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "completed"
    assert report["run_dir"] == str(tmp_path / "runs" / "first")
    assert report["batch"] == {"per_device": 2, "accumulation": 8, "processes": 1, "global": 16}
    again = finetune(f"recipe={tmp_path / 'runs' / 'first' / 'config.yaml'}", at=tmp_path, name="again")
    assert again.code == 0, again.err
    first = finetune_losses(tmp_path / "runs" / "first")
    assert again.losses == first
    taken = finetune(*words[:-1], at=tmp_path, name="again")
    assert taken.code == 2
    assert "never writes into another one's folder" in taken.err


def finetune_losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def test_a_value_arrives_in_the_workers_as_it_was_typed(tmp_path: Path) -> None:
    folder = tmp_path / "a b=c, d#e ü (1)"
    folder.mkdir()
    row = {"prompt": "x = 1 # <|im_end|>?", "completion": "ja, schön"}
    (folder / "r'ows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    done = finetune(
        "recipe=tiny_lora", "trainer.max_steps=1", f"data.train={folder / chr(114)}'ows.jsonl", at=tmp_path
    )
    assert done.code == 0, done.out + done.err
    assert str(folder) in (done.path / "data.json").read_text(encoding="utf-8").encode().decode(
        "unicode_escape"
    )


def test_the_help_of_a_verb_lists_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    from finetune.cli import main

    shown = {}
    for verb in ("merge", "train", "prepare"):
        assert main([verb, "--help"]) == 0
        shown[verb] = capsys.readouterr().out
    assert {verb: ("--to" in text, "--dry-run" in text) for verb, text in shown.items()} == {
        "merge": (True, False),
        "train": (False, True),
        "prepare": (False, False),
    }
    assert "usage: python -m finetune merge RUN" in shown["merge"]


@pytest.mark.parametrize(
    ("redirect", "code", "told"),
    [
        (">&-", 1, "cannot be written to stdout or stderr: it is closed"),
        ("> /dev/full", 1, "cannot be written to stdout or stderr: No space left on device"),
        ("2> /dev/full", 0, ""),
        ("| true", 141, ""),
    ],
)
def test_output_that_cannot_be_written_is_told_without_a_traceback(
    redirect: str, code: int, told: str
) -> None:
    shell = f"set -o pipefail; {sys.executable} -m finetune --help {redirect}"
    command = ["bash", "-c", shell]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_leaves_the_signals_of_its_process_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["train", "--dry-run", "recipe=tiny_lora", "launch.device=cpu"]) == 0
    assert main(["plan", "recipe=nosuch"]) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_letter_that_the_terminal_lacks_is_escaped(tmp_path: Path) -> None:
    said = finetune("trian_\u00fc", at=tmp_path, PYTHONIOENCODING="ascii")
    assert said.code == 2
    assert finetune("plan", "--help", "x=\u00fc", at=tmp_path, PYTHONIOENCODING="ascii").code == 0
    words = ["recipe=tiny_lora", "launch.device=cpu", "run_name=\u00fc", "--dry-run"]
    dry = finetune(*words, at=tmp_path, PYTHONIOENCODING="ascii")
    assert dry.code == 0, dry.err
    assert "\\xfc (not started: --dry-run" in dry.out


@pytest.mark.parametrize(("number", "code"), [("SIGHUP", 129), ("SIGINT", 130)])
def test_an_interrupted_verb_says_what_it_was_and_what_is_left(
    number: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        "if 'finetune' in sys.orig_argv:\n"
        "    import time, finetune.data.prepare as prepare\n"
        "    wait = lambda *given, **more: (pathlib.Path('begun').touch(), time.sleep(300))\n"
        "    prepare.prepare_data = wait\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "prepare", "recipe=tiny_lora", "--json"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for("beginning", (tmp_path / "begun").exists, seconds=60)
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    told = f"prepare was interrupted by {number}: nothing is left but what had been prepared whole"
    assert process.returncode == code
    assert err.splitlines()[-1] == told
    assert json.loads(out) == {"error": told, "exit_code": code}
