"""The numbers that belong to a failure: memory that was planned and is there, disks, kills by the kernel."""

from __future__ import annotations

import json
import re
import resource
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import hub
from finetune.config.rules import RunFacts
from finetune.config.schema import RunConfig
from finetune.data.prepare import cache_root
from finetune.hardware.cgroup import machine_oom_kills, oom_kills
from finetune.hardware.memory import free_bytes, total_bytes
from finetune.hardware.mounts import SHARED_MEMORY, Room, room_of
from finetune.paths import RunDir

FULL_BYTES, FULL_SHARE = 2**20, 0.005
"""A file system with less than that free is called full."""


@dataclass(frozen=True, slots=True)
class Kills:
    """How many processes the kernel has killed for lack of memory so far."""

    count: int | None
    """None: it does not say."""
    whose: str
    """Of this container (its control group) where that is counted, else of the whole machine."""


@dataclass(frozen=True, slots=True)
class Clue:
    """What gives a cause away, and the run that it is about."""

    run_dir: RunDir
    config: RunConfig
    facts: RunFacts
    rank: int | None
    """Whose words they are; None: the parent's or the launcher's."""
    text: str
    """What the process said when it failed; of one that could say nothing, the end of its log."""
    logs: Mapping[int, str]
    """The end of every rank's log."""
    silent: tuple[int, ...]
    """Ranks that have left no word of why they ended."""
    kills: Kills
    """Before the run."""

    @property
    def log(self) -> str:
        return self.logs.get(self.rank, "") if self.rank is not None else ""


def count_kills() -> Kills:
    """What the kernel counts now: the container's own count tells of its processes alone."""
    own = oom_kills()
    if own is not None:
        return Kills(own, "this container")
    return Kills(machine_oom_kills(), "this machine")


def gpu_memory(clue: Clue) -> list[str]:
    """What torch's own message says, and what was planned."""
    text, said = clue.text, []
    if asked := re.search(rf"Tried to allocate {_SIZE}", text):
        said.append(f"{asked[1]} more were asked for")
    if card := re.search(rf"GPU (\d+) has a total capac\w+ of {_SIZE} of which {_SIZE} is free", text):
        said.append(f"GPU {card[1]} has {card[2]}, {card[3]} of it free")
    if held := re.search(rf"Of the allocated memory {_SIZE} is allocated by PyTorch", text):
        pieces = re.search(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
        said.append(f"torch held {held[1]}" + (f" and {pieces[1]} in free pieces" if pieces else ""))
    said += [f"process {pid} held {size} of it" for pid, size in other_processes(text)]
    return [*filter(None, ["; ".join(said)]), *planned_terms(clue.run_dir)]


def other_processes(text: str) -> list[tuple[str, str]]:
    """Other processes on the card, by torch's message: their ids and what they hold."""
    return re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)


def planned_terms(run_dir: RunDir) -> list[str]:
    """What the chosen strategy was planned to hold on a card, term by term."""
    option = chosen_option(run_dir)
    if option is None:
        return []
    gpu = option["gpu"]
    names = ("weights", "gradients", "optimizer", "master_weights", "activations", "logits", "other")
    terms = ", ".join(f"{name.replace('_', ' ')} {_gb(gpu[name])}" for name in names if gpu[name])
    peak = gpu["peak_allocated"]
    return [
        f"planned ({option['strategy']}), in GB: {terms}; {_gb(peak['expected'])} at once, "
        f"{_gb(peak['upper'])} at most"
    ]


def chosen_option(run_dir: RunDir) -> dict[str, Any] | None:
    """The strategy of the run as it was planned; None where nothing was."""
    plan = read_plan(run_dir)
    found = (option for option in plan.get("strategies", ()) if option["strategy"] == plan["chosen"])
    return next((option for option in found if "gpu" in option), None)


def read_plan(run_dir: RunDir) -> dict[str, Any]:
    """plan.json; empty where nothing was planned."""
    if not run_dir.plan.exists():
        return {}
    content: dict[str, Any] = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    return content


def host_memory(clue: Clue) -> list[str]:
    """The RAM that is here, its limits, what was asked for, and what was planned."""
    said = [f"{_gb(total_bytes())} GB of RAM are here, {_gb(free_bytes())} of them free now"]
    if asked := re.search(r"you tried to allocate (\d+) bytes", clue.text):
        said.insert(0, f"{_gb(int(asked[1]))} GB more were asked for")
    if (limit := address_limit()) is not None:
        said.append(f"a process may have {_gb(limit)} GB of addresses (ulimit -v)")
    option = chosen_option(clue.run_dir)
    if option is not None:
        host = option["host"]
        said.append(f"planned: {_gb(host['expected'])} to {_gb(host['upper'])} GB on a machine")
    return ["; ".join(said)]


def address_limit() -> int | None:
    """The limit of this process, which its children inherit; None: there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def kernel_kills(clue: Clue) -> list[str]:
    """Whether the kernel has killed for lack of memory since the run began, and the RAM."""
    return [_kills_told(clue.kills, count_kills()), *host_memory(clue)]


def killed_for_memory(clue: Clue) -> bool | None:
    """Whether the kernel's count has risen since the run began; None: it cannot be read."""
    before, after = clue.kills.count, count_kills().count
    return None if before is None or after is None else after > before


def shared_memory(clue: Clue) -> list[str]:
    """/dev/shm, and who uses it."""
    workers = clue.config.trainer.dataloader_num_workers or 0
    who = f"trainer.dataloader_num_workers={workers} in each of {clue.facts.num_processes} processes"
    if not SHARED_MEMORY.is_dir():
        return [f"there is no {SHARED_MEMORY} here; {who}"]
    room = room_of(SHARED_MEMORY)
    sizes = f"{room.total_bytes / 1e6:,.1f} MB, {room.free_bytes / 1e6:,.1f} free now"
    return [f"{SHARED_MEMORY} has {sizes}; {who}"]


def disks(clue: Clue) -> list[str]:
    """Which file system is full, of those that a run writes to and of the file that was named."""
    places = {
        "the run": clue.run_dir.path,
        "prepared data": cache_root(),
        "temporary files": Path(tempfile.gettempdir()),
        "the hub's cache": Path(hub.cache_folder()),
        "shared memory": SHARED_MEMORY,
    }
    if named := re.search(r"(?:No space left on device|Disk quota exceeded): '(/[^']+)'", clue.text):
        places = {"the file that was written": Path(named[1]), **places}
    found: dict[int, tuple[Room, list[str]]] = {}
    for use, place in places.items():
        room = room_of(place)
        found.setdefault(room.nearest.stat().st_dev, (room, []))[1].append(use)
    full = [_told(room, uses) for room, uses in found.values() if _is_full(room)]
    if full:
        return [f"full: {line}" for line in full]
    free = "; ".join(_told(room, uses) for room, uses in found.values())
    return [f"none of these is full now (what could not be finished may have been removed): {free}"]


def is_full(folder: Path) -> bool:
    return _is_full(room_of(folder))


def nccl_words(clue: Clue) -> list[str]:
    """The last thing that NCCL said of its error."""
    warned = re.findall(r"NCCL WARN (.+)", f"{clue.log}\n{clue.text}")
    last = re.search(r"Last error:[ \t]*\n?[ \t]*(\S.*)", clue.text)
    kind = re.search(r"\bnccl\w+(?:Error|Usage|Argument)\b", clue.text)
    said = warned[-1].strip() if warned else last[1].strip() if last else ""
    return [": ".join(filter(None, [kind[0] if kind else "", said]))] if kind or said else []


def waiting_ranks(clue: Clue) -> list[str]:
    """In which collective each rank waited when the time was over, and who did not say."""
    waits: dict[str, list[int]] = {}
    for rank, log in clue.logs.items():
        if work := re.search(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+).*?Timeout\(ms\)=(\d+)", log):
            where = f"{work[2]} (number {work[1]}) for {int(work[3]) / 1000:,.0f} s"
            waits.setdefault(where, []).append(rank)
    lines = [f"{ranks_named(ranks)} waited in {where}" for where, ranks in waits.items()]
    waiting = {rank for ranks in waits.values() for rank in ranks}
    others = [rank for rank in range(clue.facts.num_processes) if rank not in waiting]
    if waits and others:
        lines.append(f"{ranks_named(others)} did not say so: hung, behind, or gone")
    return lines


def last_words(clue: Clue) -> list[str]:
    """Who has left no word, and the last line of each one's log."""
    lines = []
    for rank in clue.silent:
        log = clue.logs.get(rank, "").strip().splitlines()
        lines.append(f"rank {rank} has left no word of why it ended; its log ends: {log[-1] if log else '-'}")
    if killed_for_memory(clue):
        lines.append(_kills_told(clue.kills, count_kills()))
    return lines or ["every rank says no more than that; look at the machines and the network between them"]


def matching_lines(*patterns: str) -> Callable[[Clue], list[str]]:
    """The first line, of what was said or logged, that holds a pattern: the first pattern that one holds."""

    def find(clue: Clue) -> list[str]:
        lines = f"{clue.text}\n{clue.log}".splitlines()
        return [line.strip() for pattern in patterns for line in lines if re.search(pattern, line)][:1]

    return find


def ranks_named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"


def _is_full(room: Room) -> bool:
    if room.total_bytes == 0:  # /proc and its like hold no files of anybody
        return False
    return room.free_files == 0 or room.free_bytes < max(FULL_BYTES, FULL_SHARE * room.total_bytes)


def _told(room: Room, uses: list[str]) -> str:
    inodes = ", no inodes are left" if room.free_files == 0 else ""
    unit, name = (1e9, "GB") if room.total_bytes >= 1e9 else (1e6, "MB")
    sizes = f"{room.free_bytes / unit:,.2f} of {room.total_bytes / unit:,.2f} {name} free"
    return f"{room.nearest} ({', '.join(uses)}): {sizes}{inodes}"


def _kills_told(before: Kills, after: Kills) -> str:
    if before.count is None or after.count is None:
        return "if nobody did that, the kernel did because memory was short: see dmesg"
    new = after.count - before.count
    if new <= 0:
        return (
            "the kernel counts no kill for lack of memory since the run began: somebody or another program "
            "has sent the signal"
        )
    count = "a process" if new == 1 else f"{new} processes"
    risen = f"oom_kill: {before.count} -> {after.count}"
    return f"the kernel killed {count} of {after.whose} for lack of memory ({risen})"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size < 1e10 else f"{size / 1e9:,.1f}"
