"""The state of a run in files: safetensors of flat ranges from every rank, and one JSON of the numbers.

What is written here `finetune.model.state` reads. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch.optim.lr_scheduler import LambdaLR

from finetune.errors import RunFailed
from finetune.model.state import BUFFER, WEIGHT, SavedState
from finetune.training.checkpoint import NUMBERS, Entry, entry_of
from finetune.training.live import Live, Settings

FILE_BYTES = 2**30
"""Largest file; so much more memory is needed while one is written."""

BY_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs"}
"""What torch's schedules keep for each group of parameters."""

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """What goes into one file."""

    tensors: Tensors
    shapes: dict[str, str]
    """`KIND/NAME` -> shape of the whole tensor, as JSON."""


def parts(live: Live, rank: int, world_size: int) -> Iterator[Part]:
    """This rank's own ranges by files; those that every rank holds are dealt out. Still the live memory."""
    tensors: Tensors = {}
    shapes: dict[str, str] = {}
    room = FILE_BYTES
    for found in live.ranges():
        first, last = 0, found.values.numel()
        if found.everywhere:
            share = math.ceil(last / world_size)
            first, last = min(rank * share, last), min((rank + 1) * share, last)
        while first < last:
            count = min(last - first, max(room // found.values.element_size(), 1))
            key = f"{found.kind}/{found.name}"
            tensors[f"{key}@{found.start + first}"] = found.values[first : first + count]
            shapes[key] = json.dumps(list(found.whole))
            first, room = first + count, room - count * found.values.element_size()
            if room <= 0:
                yield Part(tensors, shapes)
                tensors, shapes, room = {}, {}, FILE_BYTES
    yield Part(tensors, shapes)  # at least one file a rank: a lost one is noticed


def own_bytes(live: Live, rank: int, world_size: int) -> int:
    """How much this rank writes."""
    return sum(tensor.nbytes for part in parts(live, rank, world_size) for tensor in part.tensors.values())


def on_cpu(part: Part) -> Part:
    """A copy that training does not change."""
    return Part({key: values.to("cpu", copy=True) for key, values in part.tensors.items()}, part.shapes)


def write_file(path: Path, part: Part) -> Entry:
    """Write a file of tensors to the disk, and read it back from there."""
    content = safetensors.torch.save(part.tensors, metadata=part.shapes)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
    digest = xxhash.xxh3_128(content).hexdigest()
    entry = {"bytes": len(content), "xxh3": digest}
    del content
    if entry_of(path) != entry:
        raise OSError(f"{path.name} does not read back as it was written")
    return entry


def write_numbers(folder: Path, live: Live, trainer: Any) -> None:
    """Write what is no tensor: the optimizer's settings, the schedule, the loss scale. Rank 0 alone."""
    content = {
        **asdict(live.settings()),
        "scheduler": _schedule(trainer.lr_scheduler),
        "loss_scale": _loss_scale(trainer),
    }
    (folder / NUMBERS).write_text(json.dumps(content), encoding="utf-8")


def take_up_state(folder: Path, live: Live, trainer: Any) -> None:
    """Fill a trainer's fresh state with a saved one, of whatever strategy and number of ranks. All ranks."""
    saved = SavedState(folder)
    content = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    live.make(Settings(content["groups"], content["numbers"]), saved.like())
    _fill(live, saved)
    _set_schedule(trainer.lr_scheduler, content["scheduler"])
    _set_loss_scale(trainer, content["loss_scale"])


def take_up_weights(folder: Path, live: Live) -> None:
    """Fill the weights alone."""
    _fill(live, SavedState(folder), only=(WEIGHT, BUFFER))


def _fill(live: Live, saved: SavedState, only: tuple[str, ...] = ()) -> None:
    """Copy every range that this rank holds from the files."""
    with torch.no_grad():
        for mine in live.ranges():
            if not only or mine.kind in only:
                saved.read(mine.kind, mine.name, mine.whole, mine.start, mine.values)
    live.settle()


def _schedule(scheduler: Any) -> dict[str, Any]:
    """A schedule's state; what it has for each group of parameters once: the Trainer has one rate for all,
    and DeepSpeed drops the groups without parameters.
    """
    content = dict(scheduler.state_dict())
    for key in BY_GROUP & content.keys():
        if any(value != content[key][0] for value in content[key]):
            raise RunFailed(
                f"the groups of parameters have schedules of their own ({key}), which is not saved."
            )
        content[key] = content[key][0]
    return content


def _set_schedule(scheduler: Any, saved: dict[str, Any]) -> None:
    fresh = scheduler.state_dict()
    of_groups = {key: [saved[key]] * len(fresh[key]) for key in BY_GROUP & saved.keys()}
    scheduler.load_state_dict({**fresh, **saved, **of_groups})
    if not isinstance(scheduler, LambdaLR):
        return
    # the next step's rate by this run's own schedule: it is the saved one unless the run was made longer
    rate = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch)
    if rate != saved["_last_lr"]:
        step = scheduler.last_epoch
        log.info("schedule  the next rate is %.3g; it was %.3g before step %d", rate, saved["_last_lr"], step)
    for group in scheduler.optimizer.param_groups:
        group["lr"] = rate
    scheduler._last_lr = [rate] * len(scheduler.base_lrs)  # what is logged


def _loss_scale(trainer: Any) -> dict[str, Any] | None:
    """fp16 alone has one: of accelerate's scaler, or of DeepSpeed's optimizer."""
    if not trainer.args.fp16:
        return None
    if trainer.is_deepspeed_enabled:
        scaler = trainer.model_wrapped.optimizer.loss_scaler
        return {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    return dict(trainer.accelerator.scaler.state_dict())


def _set_loss_scale(trainer: Any, saved: dict[str, Any] | None) -> None:
    if saved is None or not trainer.args.fp16:
        return
    if trainer.is_deepspeed_enabled:
        scaler = trainer.model_wrapped.optimizer.loss_scaler
        wanted = saved if "cur_scale" in saved else {"cur_scale": saved["scale"]}
        for key, value in wanted.items():
            setattr(scaler, key, value)
        return
    scaler = trainer.accelerator.scaler
    scaler.load_state_dict(
        {**scaler.state_dict(), **({"scale": saved["cur_scale"]} if "cur_scale" in saved else saved)}
    )
