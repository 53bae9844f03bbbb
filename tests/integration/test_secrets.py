"""Invented tokens in the environment, printed by everybody, and not one byte of them anywhere afterwards."""

from __future__ import annotations

import time
from base64 import b64encode
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from tests.front_door import assert_all_gone, environment, finetune, started

SECRETS = {
    "HF_TOKEN": "hf_" + "q7" * 17,
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalr/XUtnF+EMI" + "/K7MDENG/bPxRfi" * 2,
    "OPENAI_API_KEY": "sk-proj-" + "w3" * 24,
    "MY_SERVICE_PASSWORD": "correct horse & 17 batteries",
}
OWN_FORMAT = """\
import os, sys
print("own format, to stdout:", os.environ["MY_SERVICE_PASSWORD"])
print("own format, to stderr:", os.environ["AWS_SECRET_ACCESS_KEY"], file=sys.stderr)
def rows(row):
    return row
"""
WORKERS = """\
import os, subprocess, sys
if any("finetune.training.worker" in word for word in sys.orig_argv):
    import finetune.training.process as process
    guarded = process.guarded
    def talkative(run_dir, rank, work, *more):
        print("python", os.environ["HF_TOKEN"], os.environ["OPENAI_API_KEY"])
        os.write(2, f"raw {os.environ['WANDB_API_KEY']}\\n".encode())
        subprocess.run("echo child $AWS_SECRET_ACCESS_KEY", shell=True)
        subprocess.run("printf %s u:$WANDB_API_KEY | base64 -w0", shell=True)
        def failing(run_dir):
            raise ValueError("no entry with " + os.environ["MY_SERVICE_PASSWORD"])
        return guarded(run_dir, rank, failing if "FAIL" in os.environ else work, *more)
    process.guarded = talkative
"""
WORDS = [
    *("recipe=tiny_lora", "distributed=ddp", "launch.num_processes=2", "launch.device=cpu"),
    *("data.train.0.limit=16", "data.train.0.format=own:rows", "trainer.max_steps=2"),
    "checkpoint.every_steps=1",
]
HOOK = (
    'echo "hook $MY_SERVICE_PASSWORD"; printf %s "$AWS_SECRET_ACCESS_KEY" | base64 -w0; echo "$HF_TOKEN" >&2'
)


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """The user's format function, and workers that print every secret by every way out of a process."""
    (tmp_path / "own.py").write_text(OWN_FORMAT, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(WORKERS, encoding="utf-8")
    return {**SECRETS, "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}


def assert_nowhere(run: Path, *printed: str) -> None:
    """Not one of the secrets is in what was printed, or in any byte of the run's folder, in whatever form."""
    files = [file for file in run.rglob("*") if file.is_file()]
    contents = {str(file): file.read_bytes() for file in files}
    contents |= {f"output {number}": text.encode() for number, text in enumerate(printed)}
    for name, secret in SECRETS.items():
        content = secret.encode()
        encoded = [b64encode(b"u:"[:offset] + content)[4:-4] for offset in range(3)]
        forms = [content, quote(secret, safe="").encode(), content.hex().encode(), *encoded]
        assert [(name, place) for place, held in contents.items() if any(f in held for f in forms)] == []


def test_no_secret_is_left_of_a_run_in_which_everybody_prints_them(
    surroundings: dict[str, str], tmp_path: Path
) -> None:
    commands: set[str] = set()
    with started(*WORDS, f"hooks.on_end={HOOK}", at=tmp_path, **surroundings) as (process, run):
        parent, until = psutil.Process(process.pid), time.monotonic() + 100
        while process.poll() is None and time.monotonic() < until:
            for child in [parent, *parent.children(recursive=True)]:
                try:
                    commands.add(" ".join(child.cmdline()))
                except psutil.Error:
                    continue
            time.sleep(0.2)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0, out + err
    assert_nowhere(run.path, out, err, *commands)
    assert sum("finetune.training.worker" in command for command in commands) >= 2
    assert list(run.path.rglob("checkpoint-1/*.pth"))
    assert not list(run.path.rglob("training_args.bin"))
    assert "own format, to stdout: ***" in out
    assert "own format, to stderr: ***" in err
    assert "          hook ***" in out
    for rank in (0, 1):
        log = (run.path / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        assert "python *** ***\n" in log
        assert "raw ***\n" in log
        assert "child ***\n" in log


def test_no_secret_is_left_of_a_run_that_fails_or_is_refused(
    surroundings: dict[str, str], tmp_path: Path
) -> None:
    hook = f"hooks.on_failure={HOOK}"
    failed = finetune(*WORDS, hook, at=tmp_path, FAIL="1", **surroundings)
    assert failed.code == 1
    assert "ValueError: no entry with ***" in failed.err
    assert "no entry with ***" in failed.report["error"]
    assert list(failed.path.rglob("rank-*.failed.json"))
    assert_nowhere(failed.path, failed.out, failed.err)
    for secret in SECRETS.values():
        refused = finetune(*WORDS, f"hooks.on_end=call {secret}", at=tmp_path, name="refused", **surroundings)
        assert refused.code == 2
        assert "hooks.on_end=***" in refused.err
        assert_nowhere(failed.path, refused.out, refused.err)


def test_no_secret_is_left_of_a_run_in_the_background(surroundings: dict[str, str], tmp_path: Path) -> None:
    words = [*WORDS, "launch.detach=true", f"hooks.on_failure={HOOK}"]
    outcome = finetune(*words, at=tmp_path, FAIL="1", **surroundings)
    assert outcome.code == 0, outcome.err
    log, until = outcome.path / "logs" / "parent.log", time.monotonic() + 60
    said = ""
    while not ("hook ***" in said and "no entry with ***" in said) and time.monotonic() < until:
        time.sleep(0.2)
        said = log.read_text(encoding="utf-8") if log.exists() else ""
    assert "          hook ***" in said
    assert_all_gone(outcome.path)
    assert_nowhere(outcome.path, outcome.out, outcome.err)
