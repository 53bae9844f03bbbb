"""Brings a run off its machine beside the training, in a process of its own: `python -m
finetune.training.upload RUN_DIR`.

It sends the newest whole checkpoint that is not in the store yet, again and again, until the run's end is
told on its stdin; then all that the run has left. A closed stdin means that the run is gone: it ends at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from finetune.config.saved import load_config
from finetune.config.schema import CheckpointConfig
from finetune.paths import RunDir, write_whole
from finetune.remote.address import whole_address
from finetune.remote.store import Store, StoreError, open_store
from finetune.report.record import read_report
from finetune.training.checkpoint import MANIFEST, numbered, read_manifest, step_of
from finetune.training.remote_run import FINISH, best_of, lacking, upload_seconds
from finetune.training.retry import Trouble, Waiting
from finetune.training.sent import Sent

LOOK_SECONDS = 0.5
"""How often the folder is looked at; a listing of one folder costs nothing beside a step."""


class Superseded(StoreError):
    """The run has ended meanwhile, and a newer checkpoint is what counts."""


class Uploader:
    """What has to go to the store, and when."""

    def __init__(self, run_dir: RunDir, checkpoint: CheckpointConfig, finish: Event) -> None:
        assert checkpoint.remote is not None
        self.run_dir = run_dir
        self.address = whole_address(checkpoint.remote)
        self.name = run_dir.path.name
        self.where = f"{self.address}/{self.name}"
        self.finish = finish
        self.staging = run_dir.uploading
        self.trouble = Trouble(self.where, _say)
        self.there = Sent(run_dir, self.where, checkpoint.keep, _say)
        self.files_sent = 0
        self.verified: dict[str, bytes] = {}
        """The manifests of checkpoints that are verified there, by name."""
        self.sending: Path | None = None
        """The checkpoint that is on its way."""
        self._store: Store | None = None

    def beside_training(self) -> None:
        """Send each checkpoint that appears; a failure is told, and tried again with the newest then."""
        waiting = Waiting(self.finish)
        while not self.finish.is_set():
            try:
                sent = self.send_newest()
            except Superseded:
                return
            except (StoreError, OSError) as error:
                self.trouble.met(error)
                waiting.longer()
                continue
            waiting.reset()
            if not sent:
                self.finish.wait(LOOK_SECONDS)

    def at_the_end(self) -> bool:
        """Send what is left: newest checkpoint, model, records. True when all is there and verified."""
        status = _status(self.run_dir)
        try:
            self._until_done(self.send_newest)
            if status == "completed":
                self._until_done(self.send_model)
            self._until_done(lambda: self._put(self._records()))
            self.there.write_report()
            self._until_done(lambda: self._put(self._one(self.run_dir.report)))
        except (StoreError, OSError) as error:
            self.there.write_report(str(error))
            return False
        _say(f"remote    {self.there.describe()} are at {self.where}, and verified")
        return True

    def send_newest(self) -> bool:
        """Send the newest published checkpoint unless it is there already, and before it the best one that it
        names; False: there is nothing to send.

        They are linked first: what prunes old ones cannot take them away meanwhile.
        """
        folder = self._newest()
        if folder is None:
            return False
        try:
            content = (folder / MANIFEST).read_bytes()
            if self.verified.get(folder.name) == content:
                return False
            manifest = json.loads(content)
            shutil.rmtree(self.staging, ignore_errors=True)
            best = self._whole_best(folder, manifest)
            staged = [self._stage(one) for one in (best, folder) if one is not None]
        except OSError:
            if self._newest() == folder:
                raise
            return True  # it was removed, since there is a newer one
        began, before, self.sending = time.monotonic(), self.files_sent, folder
        for one in staged:
            self.verified[one.name] = self._send_checkpoint(one)
        self.sending = None
        self.trouble.over()
        seconds = time.monotonic() - began
        write_whole(self.run_dir.upload_seconds, str(max(seconds, upload_seconds(self.run_dir))))
        self.there.prune(self.store, step_of(folder), manifest, remove=self.files_sent > before)
        shutil.rmtree(self.staging, ignore_errors=True)
        return True

    def send_model(self) -> None:
        there = f"{self.name}/model"
        files = {
            f"{there}/{path.relative_to(self.run_dir.model)}": path
            for path in sorted(self.run_dir.model.rglob("*"))
            if path.is_file()
        }
        self._put(files)
        for old in {f"{there}/{name}" for name in self.store.files(there)} - {*files}:
            self.store.remove(old)
        self.there.model = True

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_store(self.address)
        return self._store

    def end_when_silent(self) -> None:
        """From the run's end on: end this process when the store neither takes a file nor refuses it."""
        self.finish.wait()
        self.trouble.heard()
        while not self.trouble.silent():
            time.sleep(LOOK_SECONDS)
        self.there.write_report(f"the store has not answered for {self.trouble.silence():.0f} s")
        os._exit(1)

    def _put(self, files: dict[str, Path]) -> None:
        self.store.put(files, self._has_arrived)

    def _has_arrived(self, name: str) -> None:
        """Count a file. While the run lasts one that was begun is finished: slow stores get some."""
        self.files_sent += 1
        self.trouble.progress()
        if self.finish.is_set() and self.sending not in (None, self._newest()):
            raise Superseded("a newer one is there")

    def _until_done(self, send: Callable[[], object]) -> None:
        """Try until it is there; raises the last error when there was nothing but failures for too long."""
        waiting, began = Waiting(Event()), time.monotonic()
        while True:
            try:
                send()
            except (StoreError, OSError) as error:
                self.trouble.met(error)
                if self.trouble.too_long(began):
                    raise
                waiting.longer()
            else:
                self.trouble.over()
                return

    def _newest(self) -> Path | None:
        published = (f for f in reversed(numbered(self.run_dir.checkpoints)) if (f / MANIFEST).exists())
        return next(published, None)

    def _whole_best(self, newest: Path, manifest: dict[str, Any]) -> Path | None:
        """The best checkpoint that the newest one names, if it is another one, is whole and not there yet."""
        name = best_of(manifest)
        if name in ("", newest.name):
            return None
        folder = newest.with_name(name)
        try:
            known = self.verified.get(name) == (folder / MANIFEST).read_bytes()
            return None if known or _lacking(folder) else folder
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def _stage(self, folder: Path) -> Path:
        """The checkpoint under a second name; a copy where the disk knows no links."""
        staged = self.staging / folder.name
        shutil.copytree(folder, staged, copy_function=_link)
        lost = _lacking(staged)
        if lost:
            raise OSError(f"{folder}: {lost}")
        return staged

    def _send_checkpoint(self, staged: Path) -> bytes:
        """Send one, its manifest last, and return that."""
        began, there = time.monotonic(), f"{self.name}/checkpoints/{staged.name}"
        content = (staged / MANIFEST).read_bytes()
        if MANIFEST in self.store.files(there) and self.store.read(f"{there}/{MANIFEST}") != content:
            self.store.remove(f"{there}/{MANIFEST}")  # the same step, saved again after a resume
        names = json.loads(content)["files"]
        self._put({f"{there}/{name}": staged / name for name in names} | self._records())
        self._put({f"{there}/{MANIFEST}": staged / MANIFEST})
        _say(f"remote    {staged.name} is at {self.where}, and verified ({time.monotonic() - began:.1f} s)")
        return content

    def _records(self) -> dict[str, Path]:
        """The small files of the run as they are now: copies, since some of them grow."""
        run, folder = self.run_dir, self.staging / "records"
        folder.mkdir(parents=True, exist_ok=True)
        asked = (run.config, run.facts, run.environment, run.data, run.plan, run.tracking)
        for path in (*asked, run.metrics, run.samples, run.times, run.report, run.page):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        return {f"{self.name}/{path.name}": path for path in sorted(folder.iterdir())}

    def _one(self, path: Path) -> dict[str, Path]:
        return {f"{self.name}/{path.name}": path}


def _lacking(folder: Path) -> str:
    """What a checkpoint here lacks of its own manifest."""
    found = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    return lacking(found, read_manifest(folder))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _status(run_dir: RunDir) -> str | None:
    return read_report(run_dir).get("status") if run_dir.report.exists() and run_dir.model.exists() else None


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _listen(finish: Event) -> None:
    """Wait for the run's word; a run that is gone without one needs nobody here."""
    if sys.stdin.buffer.readline() != FINISH:
        os._exit(1)
    finish.set()


def _main(path: str) -> int:
    os.nice(10)  # the training comes first
    run_dir, finish = RunDir(Path(path)), Event()
    Thread(target=_listen, args=(finish,), daemon=True).start()
    uploader = Uploader(run_dir, load_config(run_dir.config).checkpoint, finish)
    Thread(target=uploader.end_when_silent, daemon=True).start()
    uploader.beside_training()
    verified = uploader.at_the_end()
    shutil.rmtree(uploader.staging, ignore_errors=True)
    return 0 if verified else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
