"""Which checkpoint goes off the machine, what stays there, and what a run does when sending ends badly."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from finetune.config.compose import compose, save_config
from finetune.config.schema import CheckpointConfig
from finetune.errors import Refusal
from finetune.paths import RunDir
from finetune.remote.store import StoreError
from finetune.report.record import Report, read_report
from finetune.training import pull, upload
from finetune.training.callbacks import NOTHING, STOP, Checkpoints, StopSignals
from finetune.training.checkpoint import MANIFEST, damage, entry_of, publish, seal
from finetune.training.lock import held
from finetune.training.pull import brought_here
from finetune.training.remote_run import FINISH
from finetune.training.retry import LONGEST_WAIT_SECONDS, Trouble, Waiting
from finetune.training.sending import Sending
from finetune.training.upload import Uploader
from tests.front_door import REPOSITORY, assert_all_gone, environment

KEEP = 2


def save(run_dir: RunDir, step: int, content: bytes = b"x", best: int | None = None) -> Path:
    part = run_dir.checkpoints / ".part" / f"checkpoint-{step}"
    (part / "state").mkdir(parents=True)
    names = ("state/rank-00000-000.safetensors", "state.json", "trainer_state.json", "rng_state.pth")
    for name in names:
        (part / name).write_bytes(content)
    seal(part, 0, {name: entry_of(part / name) for name in names})
    publish(part, run_dir.checkpoints, KEEP, {"num_processes": 1, "best": best and {"step": best}})
    return run_dir.checkpoints / f"checkpoint-{step}"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "run")
    run_dir.checkpoints.mkdir(parents=True)
    run_dir.logs.mkdir()
    words = ["recipe=tiny_lora", f"output_dir={tmp_path}/runs", f"checkpoint.remote=file://{tmp_path}/store"]
    save_config(compose(words).config, run_dir.config)
    run_dir.facts.write_text("{}")
    return run_dir


@pytest.fixture
def uploader(run_dir: RunDir, tmp_path: Path) -> Uploader:
    return Uploader(run_dir, CheckpointConfig(keep=KEEP, remote=f"file://{tmp_path}/store"), Event())


def there(tmp_path: Path) -> list[str]:
    return sorted(folder.name for folder in (tmp_path / "store/run/checkpoints").iterdir())


def test_only_the_newest_goes_and_as_many_stay_as_here(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(run_dir, step)
    (run_dir.checkpoints / "checkpoint-9").mkdir()  # not published
    assert uploader.send_newest() is True
    assert uploader.send_newest() is False
    assert there(tmp_path) == ["checkpoint-2"]
    for step in (3, 4):
        save(run_dir, step)
        uploader.send_newest()
    assert there(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert not run_dir.uploading.exists()


def test_the_best_one_stays_there_too(uploader: Uploader, run_dir: RunDir, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(run_dir, step, best=1)
        uploader.send_newest()
    assert there(tmp_path) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


def test_a_best_one_that_was_superseded_before_it_was_sent_goes_before_the_newest(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        save(run_dir, step, best=1)
    sent: list[str] = []
    send = uploader.store._send

    def note(name: str, file: Path) -> None:
        sent.append(name)
        send(name, file)

    monkeypatch.setattr(uploader.store, "_send", note)
    assert uploader.send_newest() is True
    assert there(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    manifests = [name for name in sent if name.endswith(MANIFEST)]
    assert manifests == [f"run/checkpoints/checkpoint-{step}/{MANIFEST}" for step in (1, 4)]
    assert uploader.there.checkpoints == ["checkpoint-1", "checkpoint-4"]
    save(run_dir, 5, best=1)
    (run_dir.checkpoints / "checkpoint-1/state.json").unlink()
    assert uploader.send_newest() is True
    assert there(tmp_path) == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]
    assert not [name for name in sent[len(manifests) * 5 :] if "checkpoint-1/" in name]


def test_a_best_one_that_is_not_whole_here_keeps_nothing_back(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path
) -> None:
    save(run_dir, 1)
    (run_dir.checkpoints / "checkpoint-1/state.json").unlink()
    save(run_dir, 2, best=1)
    assert uploader.send_newest() is True
    assert there(tmp_path) == ["checkpoint-2"]


def test_after_a_run_went_back_its_new_steps_take_the_place_of_the_old(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path
) -> None:
    for step in (5, 6):
        save(run_dir, step, b"old")
        uploader.send_newest()
    shutil.rmtree(run_dir.checkpoints)
    run_dir.checkpoints.mkdir()
    save(run_dir, 5, b"new")
    uploader.send_newest()
    assert there(tmp_path) == ["checkpoint-5"]
    assert (tmp_path / "store/run/checkpoints/checkpoint-5/state.json").read_bytes() == b"new"


def test_one_that_is_removed_here_while_it_is_sent_arrives_whole(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run_dir, 1)
    send = uploader.store._send

    def prune_then_send(name: str, file: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        send(name, file)

    monkeypatch.setattr(uploader.store, "_send", prune_then_send)
    assert uploader.send_newest() is True
    sent = (tmp_path / "store/run/checkpoints/checkpoint-1").rglob("*")
    assert len([path for path in sent if path.is_file()]) == 5


def test_when_the_run_has_ended_an_older_one_is_dropped_for_the_newest(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 1)
    send = uploader.store._send

    def end_then_send(name: str, file: Path) -> None:
        if not uploader.finish.is_set():
            save(run_dir, 2)
            uploader.finish.set()
        send(name, file)

    monkeypatch.setattr(uploader.store, "_send", end_then_send)
    uploader.beside_training()
    assert not (tmp_path / "store/run/checkpoints/checkpoint-1" / MANIFEST).exists()
    assert uploader.at_the_end() is True
    assert there(tmp_path) == ["checkpoint-2"]
    assert read_report(run_dir)["remote"]["checkpoints"] == ["checkpoint-2"]


def test_without_its_manifest_one_does_not_exist_there(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(run_dir, 1)
    sent: list[str] = []
    send = uploader.store._send

    def fail_once(name: str, file: Path) -> None:
        if name.endswith("trainer_state.json") and len(sent) == len({*sent}):
            sent.append(name)
            sent.append(name)
            raise StoreError("cut off")
        sent.append(name)
        send(name, file)

    monkeypatch.setattr(uploader.store, "_send", fail_once)
    with pytest.raises(StoreError):
        uploader.send_newest()
    assert not (tmp_path / "store/run/checkpoints/checkpoint-1" / MANIFEST).exists()
    uploader.send_newest()
    assert sent[-1].endswith(MANIFEST)
    assert sent.count(f"run/checkpoints/{folder.name}/state.json") == 1


def test_a_streak_of_failures_is_told_once_and_its_end_too() -> None:
    told: list[str] = []
    trouble = Trouble("s3://bucket/run", told.append)
    for _ in range(3):
        trouble.met(StoreError("no way there"))
    trouble.over()
    trouble.over()
    assert len(told) == 2
    assert "no way there" in told[0]
    assert "after 3 failures" in told[1]


def test_waits_grow_to_a_minute_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    waits: list[float] = []
    monkeypatch.setattr(over, "wait", waits.append)
    waiting = Waiting(over)
    for _ in range(12):
        waiting.longer()
    assert waits[0] <= 1.0
    assert LONGEST_WAIT_SECONDS / 2 <= waits[-1] <= LONGEST_WAIT_SECONDS


def test_a_newer_one_here_wins_over_the_store(uploader: Uploader, run_dir: RunDir, tmp_path: Path) -> None:
    save(run_dir, 1)
    uploader.send_newest()
    newest = save(run_dir, 2)
    words = [
        "recipe=tiny_lora",
        f"output_dir={tmp_path}/runs",
        f"checkpoint.resume=file://{tmp_path}/store/run",
    ]
    told: list[str] = []
    config = brought_here(compose(words).config, None, told.append)  # type: ignore[arg-type]
    assert config.checkpoint.resume == "auto"
    assert told == [
        f"resume    this machine's {newest.name} is newer than checkpoint-1 at file://{tmp_path}/store/run"
    ]
    named = f"{words[-1]}/checkpoints/checkpoint-1"
    config = brought_here(compose([*words[:-1], named]).config, None, told.append)  # type: ignore[arg-type]
    assert config.checkpoint.resume == str(run_dir.checkpoints / "checkpoint-1")  # the very same is here


@dataclass
class Elsewhere:
    run_dir: RunDir
    bring: Callable[[], Any]
    told: list[str]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(folder.name for folder in self.run_dir.checkpoints.iterdir())


@pytest.fixture
def elsewhere(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Elsewhere:
    """Another machine, onto which a run comes whose best checkpoint is its first; the run is not compared."""
    for step in (1, 2, 3):
        save(run_dir, step, best=1)
        uploader.send_newest()
    monkeypatch.setattr(pull, "compare", lambda *asked: SimpleNamespace(problems=[]))
    words = [f"output_dir={tmp_path}/elsewhere", f"checkpoint.resume=file://{tmp_path}/store/run"]
    told: list[str] = []
    config, facts = compose(["recipe=tiny_lora", *words]).config, SimpleNamespace()
    bring = partial(brought_here, config, facts, told.append)  # type: ignore[arg-type]
    return Elsewhere(RunDir(tmp_path / "elsewhere/run"), bring, told)


@pytest.mark.parametrize("begun", [False, True])
def test_the_best_one_comes_with_the_newest(elsewhere: Elsewhere, run_dir: RunDir, begun: bool) -> None:
    if begun:
        elsewhere.run_dir.checkpoints.mkdir(parents=True)
        shutil.copyfile(run_dir.config, elsewhere.run_dir.config)
    stale = elsewhere.run_dir.path.with_name(".run.fetched") / "checkpoints/checkpoint-2"
    stale.mkdir(parents=True)
    elsewhere.bring()
    assert elsewhere.checkpoints == ["checkpoint-1", "checkpoint-3"]
    assert not any(damage(folder) for folder in elsewhere.run_dir.checkpoints.iterdir())
    assert [path.name for path in elsewhere.run_dir.path.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda best: (best / "state.json").write_bytes(b"y"), "state.json has changed since it was written"),
        (lambda best: (best / "state.json").unlink(), "state.json is missing"),
        (lambda best: (best / MANIFEST).unlink(), "it has no manifest.json"),
        (shutil.rmtree, "it has no manifest.json"),
    ],
)
def test_a_best_one_that_is_not_whole_there_is_told(
    elsewhere: Elsewhere, tmp_path: Path, change: Callable[[Path], Any], why: str
) -> None:
    change(tmp_path / "store/run/checkpoints/checkpoint-1")
    elsewhere.bring()
    assert elsewhere.checkpoints == ["checkpoint-3"]
    line = f"resume    the best one, checkpoint-1, is not whole at file://{tmp_path}/store/run: {why}"
    assert elsewhere.told[-1].startswith(line)


def test_a_disk_that_is_too_small_here_is_told_before_anything_is_fetched(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
    with pytest.raises(Refusal, match="free, and checkpoint-3 has") as refused:
        elsewhere.bring()
    assert "Free space there" in str(refused.value)
    assert not list(elsewhere.run_dir.path.parent.rglob("state.json"))


def test_a_disk_that_is_full_here_is_told_as_this_machines_at_once(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def full(system: object, source: str, target: str) -> None:
        tries.append(source)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(Refusal, match="cannot be brought here: No space left on device") as refused:
        elsewhere.bring()
    assert refused.value.subject == "the disk of this machine"
    assert len(tries) == 1


def test_two_processes_do_not_bring_the_same_run(elsewhere: Elsewhere) -> None:
    beside = RunDir(elsewhere.run_dir.path.with_name(".run.fetched"))
    beside.path.mkdir(parents=True)
    with held(beside), pytest.raises(Refusal, match="another process is at work in it"):
        elsewhere.bring()
    elsewhere.bring()
    assert elsewhere.checkpoints == ["checkpoint-1", "checkpoint-3"]


def test_a_signal_while_the_rest_is_sent_is_told_and_the_next_one_ends_it(
    run_dir: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file where the folder should be: nothing can be sent")
    save(run_dir, 1)
    Report(run_dir, {"status": "completed"}).write()
    config = compose(["recipe=tiny_lora", f"checkpoint.remote=file://{tmp_path}/store"]).config
    told: list[str] = []
    with Sending(config, run_dir, told.append) as sending:
        sending.start()
        for seconds in (1.5, 2.0):
            Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
        lost = sending.finish(0)
    assert "SIGTERM: the rest is being sent (again: end at once)" in told
    assert f"The whole copy is on this machine: {run_dir.path}" in lost
    report = read_report(run_dir)
    assert report["status"] == "completed"
    assert report["remote"]["verified"] is False
    assert_all_gone(run_dir.path, seconds=5)
    with Sending(config, run_dir, told.append) as sending:
        sending.start()
        began = time.monotonic()
        assert sending.finish(143, at_once=True) != ""
    assert time.monotonic() - began < 1


def test_one_that_died_is_begun_again_at_the_end(run_dir: RunDir, tmp_path: Path) -> None:
    config = compose(["recipe=tiny_lora", f"checkpoint.remote=file://{tmp_path}/store"]).config
    told: list[str] = []
    with Sending(config, run_dir, told.append) as sending:
        sending.start()
        assert sending.process is not None
        sending.process.kill()
        sending.process.wait()
        save(run_dir, 1)
        assert sending.finish(0) == ""
    assert "sending had ended by itself" in told[0]
    assert there(tmp_path) == ["checkpoint-1"]
    assert read_report(run_dir)["remote"]["verified"] is True


def test_it_ends_with_a_run_that_is_killed(run_dir: RunDir) -> None:
    script = (
        "import sys, time; from pathlib import Path; from finetune.paths import RunDir\n"
        "from finetune.config.saved import load_config; from finetune.training.sending import Sending\n"
        "run = RunDir(Path(sys.argv[1])); sending = Sending(load_config(run.config), run, print)\n"
        "sending.start(); print(sending.process.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(run_dir.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdigit()
        parent.kill()
    assert_all_gone(run_dir.path, seconds=5)


def test_a_store_that_never_answers_ends_the_waiting_and_is_reported(run_dir: RunDir) -> None:
    save(run_dir, 1)
    script = (
        "import sys, time; from types import SimpleNamespace; from finetune.training import upload\n"
        "upload.open_store = lambda address: SimpleNamespace(files=lambda folder: time.sleep(60))\n"
        "sys.exit(upload._main(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run_dir.path)],
        input=FINISH,
        env=environment(FINETUNE_REMOTE_PATIENCE="0.1"),
        cwd=REPOSITORY,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    remote = read_report(run_dir)["remote"]
    assert remote["verified"] is False
    assert "the store has not answered for" in remote["error"]


def test_what_is_read_to_be_sent_is_no_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_REMOTE_PATIENCE", "0.01")
    (tmp_path / "large").write_bytes(bytes(2**21))
    trouble = Trouble("s3://bucket/run", lambda line: None)
    trouble.heard()
    time.sleep(0.1)
    assert trouble.silent()
    (tmp_path / "large").read_bytes()
    assert not trouble.silent()


def test_what_a_client_prints_reaches_the_log_without_secrets(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_TOKEN", "plain-words")
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'it said plain-words\\n')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = compose(["recipe=tiny_lora", f"checkpoint.remote=file://{tmp_path}/store"]).config
    with Sending(config, run_dir, lambda line: None) as sending:
        sending.start()
        assert sending.finish(0) == ""
    log = run_dir.upload_log.read_text()
    assert "it said ***" in log
    assert "plain-words" not in log


def test_a_run_ends_early_enough_to_be_sent_before_its_machine_goes(run_dir: RunDir) -> None:
    trainer: Any = SimpleNamespace(saving=SimpleNamespace(run_dir=run_dir, longest_seconds=0.0))
    watch = Checkpoints(trainer, CheckpointConfig(every_minutes=None), time.time() + 100, StopSignals())
    assert watch._wanted(time.monotonic()) == NOTHING
    run_dir.upload_seconds.write_text("45.0")
    assert watch._wanted(time.monotonic()) == STOP


def test_what_a_disk_cannot_link_is_copied(
    uploader: Uploader, run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 1)

    def no_links(source: str, target: str) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(upload.os, "link", no_links)
    assert uploader.send_newest() is True
    assert there(tmp_path) == ["checkpoint-1"]
