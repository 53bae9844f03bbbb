"""Checkpoints off the machine, as a user meets them: sent beside training, refused in time, gone on from."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from tests.front_door import Outcome, assert_all_gone, finetune, processes_of, started, wait_for_step
from tests.object_store import SECRET, ObjectStore, object_store

WORDS = ["recipe=tiny_lora", "data.train.0.limit=40", "trainer.max_steps=8", "launch.device=cpu"]
EVERY_STEP = [*WORDS, "checkpoint.every_steps=1"]
AUTO = "checkpoint.resume=auto"
TOLD = "echo $FINETUNE_STATUS $FINETUNE_EXIT_CODE >> {}/{}.txt"
TOKEN = "hf_" + "x" * 30


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        running.files().makedirs("bucket", exist_ok=True)
        yield running


@pytest.fixture(scope="module")
def sent(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, str, str]:
    """A run during which the store was away for a while; what it printed, and what its hooks did."""
    at = tmp_path_factory.mktemp("sent")
    hooks = [f"hooks.{name}={TOLD.format(at, name)}" for name in ("on_end", "on_failure")]
    words = [*EVERY_STEP, "checkpoint.keep=3", "checkpoint.remote=s3://bucket/sent", *hooks]
    with started(*words, at=at, **store.environment, HF_TOKEN=TOKEN) as (process, run):
        until(lambda: "/manifest.json" in " ".join(store.files().find("bucket/sent")))
        store.close()
        until(lambda: "not sent" in text(run.path / "logs" / "upload.log"))
        store.open()
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    assert_all_gone(run.path)
    return run, out, "".join(f"{file.name} {file.read_text()}" for file in at.glob("*.txt"))


def test_a_run_goes_on_while_its_store_is_away_and_all_of_it_is_there_in_the_end(
    sent: tuple[Outcome, str, str], store: ObjectStore
) -> None:
    run, out, hooks = sent
    assert out.count("WARNING   not sent to s3://bucket/sent/run") == 1
    assert "takes files again, after" in out
    assert "checkpoint-8, the model and the records are at s3://bucket/sent/run, and verified" in out
    assert hooks == "on_end.txt completed 0\n"
    there = store.contents("bucket/sent")
    remote = run.report["remote"]
    assert remote["verified"] is True
    assert remote["model"] is True
    assert "checkpoint-8" in remote["checkpoints"]
    assert {name.split("/")[2] for name in there if "/checkpoints/" in name} == {*remote["checkpoints"]}
    assert len(remote["checkpoints"]) <= 3
    for name, content in there.items():
        assert name.startswith("run/")
        assert "training_args.bin" not in name
        assert SECRET.encode() not in content
        assert TOKEN.encode() not in content
        if "checkpoints" not in name or "checkpoint-8" in name:
            assert content == (run.path.parent / name).read_bytes(), name
    for part in ("model", "checkpoints/checkpoint-8"):
        here = {str(p.relative_to(run.path.parent)) for p in (run.path / part).rglob("*") if p.is_file()}
        assert here == {name for name in there if name.startswith(f"run/{part}/")}
    for record in (
        "config.yaml",
        "facts.json",
        "metrics.jsonl",
        "data.json",
        "environment.json",
        "report.json",
    ):
        assert f"run/{record}" in there


@pytest.mark.parametrize(
    ("changes", "address", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIAWRONG"}, "s3://bucket/x", "Credentials come from the environment"),
        ({}, "s3://nowhere/x", "a bucket is never made here"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "s3://bucket/x", "Check the network"),
        ({}, "file:///proc/none", "checkpoint.remote=file:///proc/none"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused_before_anything_is_done(
    changes: dict[str, str],
    address: str,
    told: str,
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**store.environment, **changes}.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert main([*WORDS, f"output_dir={tmp_path / 'runs'}", f"checkpoint.remote={address}"]) == 2
    assert time.monotonic() - began < 15
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_new_run_never_takes_the_place_of_one_in_the_store(
    sent: tuple[Outcome, str, str],
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    before = store.contents("bucket/sent")
    here = [f"output_dir={tmp_path / 'runs'}", "checkpoint.remote=s3://bucket/sent"]
    assert main([*WORDS, *here, "run_name=run"]) == 2
    assert "s3://bucket/sent/run is there already" in capsys.readouterr().err
    assert main([*WORDS, *here, "run_name=run", "seed=7", AUTO]) == 2
    assert "seed=7: the run was begun with 42" in capsys.readouterr().err
    assert main([*WORDS, *here, "run_name=other", "checkpoint.resume=s3://bucket/sent/run"]) == 2
    assert "belongs to the run run" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*"))
    assert store.contents("bucket/sent") == before


def test_a_store_that_is_gone_at_the_end_fails_the_run_which_is_whole_here_and_can_be_sent_later(
    store: ObjectStore, tmp_path: Path
) -> None:
    hooks = [f"hooks.{name}={TOLD.format(tmp_path, name)}" for name in ("on_end", "on_failure")]
    words = [*EVERY_STEP, "checkpoint.remote=s3://bucket/gone", *hooks]
    away = {**store.environment, "FINETUNE_REMOTE_PATIENCE": "0.5"}
    with started(*words, at=tmp_path, **away) as (process, run):
        wait_for_step(run.path, 2)
        store.close()
        out, err = process.communicate(timeout=90)
    store.open()
    assert process.returncode == 1, out + err
    assert "the run is not whole at s3://bucket/gone/run" in err
    assert f"The whole copy is on this machine: {run.path}" in err
    assert not (tmp_path / "on_end.txt").exists()
    assert (tmp_path / "on_failure.txt").read_text() == "completed 1\n"
    assert run.report["status"] == "completed"
    assert run.report["remote"]["verified"] is False
    assert (run.path / "model" / "adapter_model.safetensors").exists()
    again = finetune(*words, AUTO, at=tmp_path, **store.environment)
    assert again.code == 0, again.err
    assert "it is completed, there is nothing to do" in again.out
    assert again.report["remote"]["verified"] is True
    assert "run/model/adapter_model.safetensors" in store.contents("bucket/gone")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mounted folder that holds three checkpoints of a run which SIGTERM stopped after a few steps."""
    at = tmp_path_factory.mktemp("stopped")
    hook = f"hooks.on_failure=ls {at}/store/run/checkpoints >> {at}/there.txt"
    keep = ["checkpoint.keep=3", "checkpoint.every_steps=1"]
    words = [*WORDS, *keep, f"checkpoint.remote=file://{at}/store", hook]
    with started(*words, at=at) as (process, run):
        send_three(run.path, at / "store/run/checkpoints")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    last = sorted((run.path / "checkpoints").glob("checkpoint-*"))[-1]
    assert last.name in (at / "there.txt").read_text()  # before the command that may stop the machine
    for file in (path for path in last.rglob("*") if path.is_file()):
        sent = at / "store/run/checkpoints" / last.name / file.relative_to(last)
        assert file.read_bytes() == sent.read_bytes()
    assert run.report["remote"]["verified"] is True
    assert run.report["status"] == "interrupted"
    return at / "store"


def test_a_new_machine_goes_on_by_name_in_the_background(
    stopped: Path, sent: tuple[Outcome, str, str], tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "store")
    remote = f"checkpoint.remote=file://{tmp_path}/store"
    begun = finetune(*EVERY_STEP, remote, AUTO, "launch.detach=true", at=tmp_path)
    assert begun.code == 0, begun.err
    assert "resume    fetching checkpoint-" in begun.out
    until(lambda: "verified" in report(begun.path).get("remote", {}), seconds=90)
    assert_all_gone(begun.path)
    assert begun.losses == sent[0].losses
    assert begun.report["status"] == "completed"
    there = report(tmp_path / "store" / "run")
    assert there["remote"]["verified"] is True
    assert there["remote"]["checkpoints"][-1] == "checkpoint-8"


def test_damaged_ones_in_a_store_are_passed_over_by_name_under_another_launcher(
    stopped: Path, sent: tuple[Outcome, str, str], tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "store")
    folders = sorted((tmp_path / "store/run/checkpoints").iterdir())
    assert len(folders) == 3
    (folders[2] / "state.json").write_bytes(flipped((folders[2] / "state.json").read_bytes()))
    (folders[1] / "trainer_state.json").unlink()
    (folders[1].parent / "checkpoint-99").mkdir()
    (folders[1].parent / "checkpoint-99" / "state.json").touch()
    address = f"file://{tmp_path}/store/run"
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=1")
    words = [*WORDS, f"checkpoint.resume={address}", f"checkpoint.remote=file://{tmp_path}/store"]
    again = finetune(*words, at=tmp_path, launcher=torchrun)
    assert again.code == 0, again.out + again.err
    assert f"passed over {folders[2].name} at {address}: state.json has changed" in again.out
    assert f"passed over {folders[1].name} at {address}: trainer_state.json is missing" in again.out
    assert f"from step {folders[0].name.removeprefix('checkpoint-')}:" in again.out
    assert again.losses == sent[0].losses
    assert again.report["remote"]["verified"] is True
    names = {folder.name for folder in (tmp_path / "store/run/checkpoints").iterdir()}
    assert "checkpoint-8" in names
    assert "checkpoint-99" not in names
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["run"]


def send_three(run: Path, there: Path) -> None:
    """Hold the worker after each checkpoint until it is sent, for as long as there are not three."""

    def newest() -> str:
        return max((file.parent.name for file in (run / "checkpoints").glob("*/manifest.json")), default="")

    last = ""
    while len(list(there.glob("*/manifest.json"))) < 3:
        until(lambda last=last: newest() > last)
        workers = [one for one in processes_of(run) if "finetune.training.worker" in one.cmdline()]
        for worker in workers:
            worker.suspend()
        last = newest()
        until(lambda last=last: (there / last / "manifest.json").exists())
        for worker in workers:
            worker.resume()


def until(met: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def report(run: Path) -> dict[str, Any]:
    return json.loads(text(run / "report.json") or "{}")


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
