"""Where things are: conf/, recipes/ and embedded files of the installation, and every file of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def assets() -> Path:
    """The folder that holds `conf/` and `recipes/`: beside the package, or inside it (wheel)."""
    checkout = PACKAGE.parent
    return checkout if (checkout / "conf" / "config.yaml").exists() else PACKAGE / "_assets"


def embedded(name: str = "") -> Path:
    """A file or folder that ships inside the package: the tiny model, its data sets."""
    return PACKAGE / "embedded" / name


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: nobody reads half of it, the old one stays until then."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def append_whole(path: Path, content: bytes) -> None:
    """Add to a file all of it or, where the disk does not take it, nothing; raises OSError then."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(before)
            raise


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run: the only hand-off between its stages."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def accelerate(self) -> Path:
        return self.path / "accelerate.yaml"

    @property
    def data(self) -> Path:
        """Statistics of the prepared data, and where it is cached."""
        return self.path / "data.json"

    @property
    def plan(self) -> Path:
        """The forecast that the run was started or gone on with; not there where nothing could be planned."""
        return self.path / "plan.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """What the model answered to a few held-out rows: before the first step, and at each evaluation."""
        return self.path / "samples.jsonl"

    @property
    def times(self) -> Path:
        """When the processes of each start of the run began and ended."""
        return self.path / "times.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def page(self) -> Path:
        """The report to look at."""
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def unverified(self) -> Path:
        """What becomes `model` once it has passed its checks."""
        return self.path / ".model-unverified"

    @property
    def failed_model(self) -> Path:
        """What did not pass its checks."""
        return self.path / "model-failed-checks"

    @property
    def lock(self) -> Path:
        """Held by whoever writes to this folder."""
        return self.path / ".lock"

    @property
    def save_now(self) -> Path:
        """A file that somebody makes to have a checkpoint saved after the running step."""
        return self.path / "SAVE_NOW"

    @property
    def resume(self) -> Path:
        """Which checkpoint the workers go on from; absent in a run that starts at step 0."""
        return self.path / "resume.json"

    @property
    def uploading(self) -> Path:
        """Links to what is on its way off this machine."""
        return self.path / ".uploading"

    @property
    def upload_seconds(self) -> Path:
        """How long it took to bring a checkpoint off this machine, at most."""
        return self.path / ".upload-seconds"

    @property
    def upload_log(self) -> Path:
        return self.logs / "upload.log"

    @property
    def tracking(self) -> Path:
        """The id that the tracker knows this run by."""
        return self.path / "tracking.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def facts(self) -> Path:
        """What the config means on this machine: strategy, processes, batch, precision."""
        return self.path / "facts.json"

    @property
    def launcher_log(self) -> Path:
        return self.logs / "launcher.log"

    def failure(self, rank: int) -> Path:
        """Why a rank ended, written by itself."""
        return self.logs / f"rank-{rank}.failed.json"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"
