"""The world a worker stands in: who launched it, which rank it is, and the process group it shares."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from finetune.config.strategy import Engine
from finetune.distributed.nccl import peer_to_peer_settings
from finetune.distributed.outer import LAUNCHER_PREFIXES
from finetune.distributed.parent import has_lost_parent
from finetune.errors import refuse

log = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT = timedelta(seconds=300)
PREPARATION_TIMEOUT = timedelta(hours=24)
"""How long the other ranks wait for rank 0 to prepare data: no collective is open meanwhile, so nothing times
out.
"""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int
    local_rank: int
    size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def current_world() -> World:
    """The world that a launcher described in the environment; alone where none did."""
    return World(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )


_store: dist.Store | None = None
_turn = 0


def shared_store() -> dist.Store:
    """The key-value store that the launcher's rendezvous gives every rank, before any process group."""
    global _store
    if _store is None:
        _store, _, _ = next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))
    return _store


def on_main_first(world: World, work: Callable[[], str]) -> str:
    """Run `work` on rank 0 and give its answer to every rank, with no collective open while it lasts.

    A failure on rank 0 reaches the others at once as `MainFailed`, so that nobody waits for a dead process.
    """
    if world.size == 1:
        return work()
    global _turn
    _turn += 1
    key, store = f"finetune/main/{_turn}", shared_store()
    if not world.is_main:
        store.wait([key], PREPARATION_TIMEOUT)
        answer: str = store.get(key).decode()
        if answer.startswith("failed:"):
            raise MainFailed(int(answer.removeprefix("failed:")))
        return answer.removeprefix("ok:")
    exit_code = 1
    try:
        answer = work()
    except BaseException as error:
        exit_code = error.exit_code if hasattr(error, "exit_code") else exit_code
        store.set(key, f"failed:{exit_code}")
        raise
    store.set(key, f"ok:{answer}")
    return answer


FAILED = "finetune/failed"


def announce_failure() -> None:
    """Tell the other ranks that this one is about to end, so that they do not wait for it in a collective."""
    if _store is not None and not has_lost_parent():
        with suppress(dist.DistError):  # another machine holds the store, and is gone
            _store.set(FAILED, "1")


def some_rank_failed() -> bool:
    """Whether a rank has announced its failure; without the store, which the launcher holds, none can."""
    if _store is None or has_lost_parent():
        return False
    with suppress(dist.DistError):
        return bool(_store.check([FAILED]))
    return False


class MainFailed(Exception):
    """Rank 0 could not prepare the run and has said why; this rank only ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("rank 0 could not prepare the run")
        self.exit_code = exit_code


def open_process_group(engine: Engine, device: str, timeout_seconds: int) -> World:
    """Join the process group that `engine` needs, and forget what the launcher meant for accelerate.

    The strategy comes from the run's own config alone: variables that accelerate's launcher (or a user's
    default accelerate config) left behind would otherwise change precision or strategy without a word.
    """
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        del os.environ[name]
    if engine is Engine.none:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        if device == "cuda":
            # with several cards in sight the Trainer would wrap the model in nn.DataParallel
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            _need_cuda()
        return World(0, 0, 1)
    if device == "cuda":
        _need_cuda()
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    world = current_world()
    if device == "cuda":
        _own_card(world)
    if not dist.is_initialized():
        dist.init_process_group(
            # gloo beside nccl: flags and row numbers are compared without waiting for a GPU
            backend="cuda:nccl,cpu:gloo" if device == "cuda" else "gloo",
            store=dist.PrefixStore("finetune/group", shared_store()),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    if engine is Engine.deepspeed:
        import deepspeed

        # ZeRO-3 shards while the model loads, and reads the world size from DeepSpeed's own communication
        # layer
        deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo", verbose=False)
    return world


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise refuse(
            "launch.device=cuda",
            "the driver shows a GPU, but torch cannot use it.",
            "See what `python -c 'import torch; torch.zeros(1).cuda()'` says; no run falls back to the CPU.",
            subject="the machine",
        )


def _own_card(world: World) -> None:
    """Bind this process to its card, before anything can open another one."""
    if world.local_rank >= torch.cuda.device_count():
        raise refuse(
            f"local rank {world.local_rank}",
            f"it needs a GPU of its own, and torch can use {torch.cuda.device_count()} here.",
            "Start fewer processes, or look at CUDA_VISIBLE_DEVICES.",
            subject="the launch",
        )
    torch.cuda.set_device(world.local_rank)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    settings = peer_to_peer_settings(names)
    os.environ.update(settings)
    if settings and world.is_main:
        log.info("%s: these cards have no peer-to-peer copies (%s)", ", ".join(settings), names[0])


def gather_objects(value: Any) -> list[Any]:
    """One picklable value of each rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def any_rank(flag: int) -> int:
    """The largest `flag` of all ranks."""
    if not dist.is_initialized():
        return flag
    tensor = torch.tensor([flag], dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
