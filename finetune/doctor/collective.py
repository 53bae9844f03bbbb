"""What each device of a run computes, copies and exchanges: `python -m finetune.doctor.collective FOLDER`.

One process a device, started as a run's own are; the folder is like a run's: config, facts and logs. Each
keeps `rank-N.stage` current, so that the one that hangs can be named, and leaves `rank-N.json`. torch is
loaded late: whoever hangs at it has said so before, and the parent knows these records without torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune.config.facts import load_facts
from finetune.config.saved import load_config
from finetune.config.strategy import TRAITS, Engine
from finetune.distributed.output import print_into
from finetune.distributed.parent import end_with_parent
from finetune.doctor.sizes import MIB, gib_text
from finetune.doctor.trials import Trial, try_software
from finetune.errors import FinetuneError
from finetune.paths import RunDir, write_whole
from finetune.secrets import masked

if TYPE_CHECKING:
    import torch

    from finetune.distributed.world import World

SIZES = {"cuda": (MIB, 64 * MIB, 1024 * MIB), "cpu": (MIB, 16 * MIB)}
"""Bytes of bfloat16 that are exchanged; a CPU's are smaller, so that it is done in seconds."""
COPY_BYTES = 256 * MIB
MOST_TAKEN = 0.25
"""Share of a card's free memory that is taken for this: others may work on it."""
WARM_UPS, ROUNDS = 3, 10
SLOW_SECONDS = 1.0
"""A round that takes longer is the measurement: more of them, and larger ones, would take minutes."""
AT_ONCE = 56
"""So many ranks send 252 in all; bfloat16 has every whole number up to 256."""
LOADING, JOINING, FIRST_EXCHANGE = "loading libraries", "joining the others", "the first exchange"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of one size, timed."""

    name: str
    size_bytes: int
    """Of the whole: what each rank holds after an all-gather, and before a reduce-scatter."""
    seconds: float
    """Mean of the rounds."""
    rounds: int
    """`ROUNDS`; 1: it is slow."""
    right: bool
    """The numbers that came out are those that were to come."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one process found."""

    rank: int
    num_processes: int
    pid: int
    host: str
    device: str
    device_name: str
    library: str
    """What exchanges, with its version."""
    peers: bool | None
    """Whether each card in sight reads the others' memory; None: there are no others."""
    to_device_bytes_s: float | None
    """From pinned memory; None: the CPU computes."""
    to_host_bytes_s: float | None
    trials: tuple[Trial, ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a process is."""

    rank: int
    pid: int
    device: str
    stage: str
    number: int
    """How many stages it has entered: every rank goes through the same ones."""


def bus_bytes_s(exchange: Exchange, processes: int) -> float:
    """The speed of the link that an exchange comes to, whatever the number of processes.

    nccl-tests' bus bandwidth (its doc/PERFORMANCE.md): S / t, times 2 (n - 1) / n for an all-reduce and
    (n - 1) / n for an all-gather and a reduce-scatter.
    """
    share = (processes - 1) / processes
    return exchange.size_bytes / exchange.seconds * (2 * share if exchange.name == "all-reduce" else share)


def turns(processes: int) -> range:
    """So few ranks send at once that bfloat16 has every sum on the way exactly; then the next ones do."""
    return range(-(-processes // AT_ONCE))


def sent_by(rank: int, turn: int) -> int:
    """1 to 8 in the turn of a rank: its being left out, or counted twice, is seen. Nothing in the others."""
    return rank % 8 + 1 if rank // AT_ONCE == turn else 0


class Progress:
    """Keeps the stage file of this process current."""

    def __init__(self, folder: Path, rank: int, device: str) -> None:
        self.file = folder / f"rank-{rank}.stage"
        self.rank, self.device, self.number = rank, device, 0

    def enter(self, stage: str) -> None:
        self.number += 1
        here = Standing(self.rank, os.getpid(), self.device, stage, self.number)
        write_whole(self.file, json.dumps(asdict(here)))


def measure(run_dir: RunDir, progress: Progress) -> None:
    """All that is tried and timed, in the order in which one needs the other."""
    config, facts = load_config(run_dir.config), load_facts(run_dir.facts)
    from finetune.distributed.world import barrier, open_process_group

    progress.enter(JOINING)
    engine = TRAITS[facts.strategy].engine
    # DeepSpeed exchanges through the same group; its own layer may compile for minutes when it joins
    joined = Engine.ddp if engine is Engine.deepspeed else engine
    world = open_process_group(joined, facts.device, int(config.trainer.ddp_timeout))
    trials = try_software(config, facts, progress.enter)
    if world.size > 1:
        progress.enter(FIRST_EXCHANGE)
        barrier()
    to_device, to_host = _copies(world, progress) if facts.device == "cuda" else (None, None)
    exchanges = _exchanges(world, facts.device, progress) if world.size > 1 else []
    progress.enter("the end")
    barrier()  # nobody leaves while another one still receives
    result = RankResult(
        rank=world.rank,
        num_processes=world.size,
        pid=os.getpid(),
        host=socket.gethostname(),
        device=progress.device,
        **_identity(world, facts.device),
        to_device_bytes_s=to_device,
        to_host_bytes_s=to_host,
        trials=trials,
        exchanges=tuple(exchanges),
    )
    write_whole(run_dir.path / f"rank-{world.rank}.json", json.dumps(asdict(result)))


def _copies(world: World, progress: Progress) -> tuple[float, float]:
    """Bytes a second to the card and back; one rank after the other, since they may share a bus."""
    import torch

    from finetune.distributed.world import barrier

    size = min(COPY_BYTES, int(MOST_TAKEN * torch.cuda.mem_get_info()[0]))
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    speeds = (0.0, 0.0)
    for turn in range(world.size):
        progress.enter(f"copies of rank {turn}")
        if turn == world.rank:
            to_device, _ = seconds_of(partial(there.copy_, here, non_blocking=True), "cuda")
            to_host, _ = seconds_of(partial(here.copy_, there, non_blocking=True), "cuda")
            speeds = size / to_device, size / to_host
        progress.enter(f"the end of the copies of rank {turn}")
        barrier()
    return speeds


def _exchanges(world: World, device: str, progress: Progress) -> list[Exchange]:
    """Every collective in every size that fits; the numbers are compared before it is timed.

    After a size with a slow round there is no larger one.
    """
    import torch

    done: list[Exchange] = []
    for size in _sizes(device):
        if any(exchange.rounds == 1 for exchange in done):
            break
        part = torch.empty(size // 2 // world.size, dtype=torch.bfloat16, device=device)
        whole = torch.empty(len(part) * world.size, dtype=torch.bfloat16, device=device)
        for name, work, right in _collectives(world, whole, part):
            progress.enter(f"{name} of {gib_text(size)}")
            correct = right()
            progress.enter(f"{name} of {gib_text(size)}, timed")
            seconds, rounds = seconds_of(work, device, partial(_of_all, device, "MAX"))
            done.append(Exchange(name, 2 * len(whole), seconds, rounds, correct))
    return done


def _sizes(device: str) -> tuple[int, ...]:
    """What fits beside the work of others, with the buffer of its parts: the smallest is tried anyway."""
    if device == "cpu":
        return SIZES[device]
    import torch

    free = _of_all(device, "MIN", torch.cuda.mem_get_info()[0])
    first, *larger = SIZES[device]
    return (first, *(size for size in larger if 2 * size <= MOST_TAKEN * free))


def _of_all(device: str, which: str, value: float) -> float:
    """The largest (MAX) or smallest (MIN) of all ranks, so that they decide alike."""
    import torch
    import torch.distributed as dist

    number = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(number, getattr(dist.ReduceOp, which))
    return float(number)


def _collectives(
    world: World, whole: torch.Tensor, part: torch.Tensor
) -> list[tuple[str, Callable[[], object], Callable[[], bool]]]:
    """Name, the exchange, and whether one of known numbers gives what it must."""
    import torch.distributed as dist

    reduce = partial(dist.all_reduce, whole)
    gather = partial(dist.all_gather_into_tensor, whole, part)
    scatter = partial(dist.reduce_scatter_tensor, part, whole)

    def is_sum(work: Callable[[], object], result: torch.Tensor) -> bool:
        right = True
        for turn in turns(world.size):  # all of them, whatever comes: the others wait in each
            whole.fill_(sent_by(world.rank, turn))
            work()
            total = sum(sent_by(rank, turn) for rank in range(world.size))
            right = all(float(extreme) == total for extreme in result.aminmax()) and right
        return right

    def is_gathered() -> bool:
        part.fill_(world.rank % 100)
        gather()
        of_each = [extremes.tolist() for extremes in whole.view(world.size, -1).aminmax(dim=1)]
        return all(found == [rank % 100 for rank in range(world.size)] for found in of_each)

    return [
        ("all-reduce", reduce, partial(is_sum, reduce, whole)),
        ("all-gather", gather, is_gathered),
        ("reduce-scatter", scatter, partial(is_sum, scatter, part)),
    ]


def seconds_of(
    work: Callable[[], object], device: str, longest: Callable[[float], float] = float
) -> tuple[float, int]:
    """Mean of the rounds and their number: `ROUNDS` after `WARM_UPS`, or the first one where that is slow.

    `longest`: of a time on all ranks, which have to do the same number of rounds.
    """
    first = longest(_mean(work, device, 1))
    if first > SLOW_SECONDS:
        return first, 1
    _mean(work, device, WARM_UPS - 1)
    return _mean(work, device, ROUNDS), ROUNDS


def _mean(work: Callable[[], object], device: str, rounds: int) -> float:
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    wait()
    return (time.perf_counter() - start) / rounds


def _identity(world: World, device: str) -> dict[str, Any]:
    import torch

    if device == "cpu":
        return {"device_name": "CPU", "library": "gloo", "peers": None}
    others = [card for card in range(torch.cuda.device_count()) if card != world.local_rank]
    reached = [torch.cuda.can_device_access_peer(world.local_rank, card) for card in others]
    library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    peers = all(reached) if reached else None
    return {"device_name": torch.cuda.get_device_name(), "library": library, "peers": peers}


def _live(run_dir: RunDir) -> NoReturn:
    """The whole life of a process; what it prints, and why it failed, goes into the folder."""
    end_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    terminal = print_into(run_dir.log(rank), terminal=False)
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    device = load_facts(run_dir.facts).device
    number = f":{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else ""
    progress = Progress(run_dir.path, rank, f"{device}{number}")
    progress.enter(LOADING)
    code = 0
    try:
        measure(run_dir, progress)
    except BaseException as error:  # noqa: BLE001 - the end of the process: every failure becomes a record
        code, told = 1, masked(traceback.format_exc())
        if isinstance(error, FinetuneError):
            code, told = error.exit_code, str(error)
        failure = {"rank": rank, "time": time.time(), "exit_code": code, "told": told}
        write_whole(run_dir.failure(rank), json.dumps(failure))
    terminal.close_log()
    os._exit(code)  # threads of a collective that failed may never end


if __name__ == "__main__":
    _live(RunDir(Path(sys.argv[1])))
