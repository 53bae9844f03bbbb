"""Which process keeps the others waiting, or ended? Told with the place where it was, and what to try."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.config.schema import LaunchConfig
from finetune.distributed.launch import Ended
from finetune.doctor.check import FAIL, Check
from finetune.doctor.collective import JOINING, LOADING, Standing
from finetune.paths import RunDir

SLOW_LOADING = "The Python environment may be on a slow or hanging disk: time `python -c 'import torch'`."


def told_hang(
    standings: dict[int, Standing],
    ranks: Sequence[int],
    stopped: frozenset[int],
    waited: str,
    launch: LaunchConfig,
) -> tuple[str, str]:
    """Who keeps the others waiting: a rank that is stopped, or one that is behind them; and what to do."""
    silent = [str(rank) for rank in ranks if rank not in standings]
    if not standings and launch.num_machines > 1:  # the launchers meet before they start their processes
        return _machines_apart(waited, launch)
    if silent:
        why = f"rank {', '.join(silent)} said nothing {waited}: its process did not begin"
        return why, "See whether `python -c 'import finetune.config.saved'` ends here."
    furthest = max(standings.values(), key=lambda standing: standing.number)
    behind = sorted((s for s in standings.values() if s.number < furthest.number), key=lambda s: s.number)
    # a stopped process lets those behind it wait as well, in the exchange that it has left
    suspects = [standings[rank] for rank in sorted(stopped)] or behind
    if not suspects:
        return _nobody_behind(standings, furthest, waited, launch)
    last = suspects[0]
    if last.number < furthest.number:
        why = f"{_name(last)} never came to '{furthest.stage}', where {_waiting(standings, furthest)}"
        why += f"; {waited} it was in '{last.stage}'"
    else:
        why = f"{_name(last)} does not go on in '{last.stage}' {waited}"
    if last.rank in stopped:
        why += "; its process is stopped (SIGSTOP, or a debugger)"
        return why, f"kill -CONT {last.pid} lets such a process go on."
    return why, SLOW_LOADING if last.stage == LOADING else _ways(last.device)


def crash_check(ended: Ended, standings: dict[int, Standing], words: str) -> Check:
    """Which process ended, where it was, and its last words."""
    last = standings.get(ended.failed_rank) if ended.failed_rank is not None else None
    who = f"{_name(last)} ended in '{last.stage}'" if last is not None else "a process ended"
    lines = ended.told.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if frames:  # the exception alone
        lines = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
    why = with_words(f"{who}: {' '.join(line.strip() for line in lines[:6])}", words)
    fix = "The run would end like that as well: begin with what it said."
    if last is not None and any(library in why.lower() for library in ("nccl", "gloo")):
        fix = _ways(last.device)
    if "out of memory" in why.lower():
        fix = "See what else is on that card (nvidia-smi): end it, or leave the card out."
    return Check("exchange", FAIL, why, fix)


def last_words(folder: RunDir, ranks: Sequence[int]) -> str:
    """NCCL's own last warning, of the first rank that has one."""
    for rank in ranks:
        log_file = folder.log(rank)
        text = log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""
        warnings = [
            line.partition("NCCL WARN")[2].strip() for line in text.splitlines() if "NCCL WARN" in line
        ]
        if warnings:
            return f"NCCL on rank {rank}: {warnings[-1]}"
    return ""


def with_words(why: str, words: str) -> str:
    return f"{why.rstrip('.')}. {words}" if words else why


def _nobody_behind(
    standings: dict[int, Standing], furthest: Standing, waited: str, launch: LaunchConfig
) -> tuple[str, str]:
    if furthest.stage == LOADING:
        return f"no process has loaded its libraries {waited}", SLOW_LOADING
    if furthest.stage == JOINING and launch.num_machines > 1:
        return _machines_apart(waited, launch)
    elsewhere = "; those of other machines are not seen from here" if launch.num_machines > 1 else ""
    why = f"all {len(standings)} ranks wait in '{furthest.stage}' {waited}: none is behind{elsewhere}"
    return why, _ways(furthest.device)


def _machines_apart(waited: str, launch: LaunchConfig) -> tuple[str, str]:
    address = f"{launch.main_process_ip}:{launch.main_process_port or 29500}"
    why = f"this machine waits for the others, which are to meet at {address}, {waited}"
    return why, "Start the same command on every machine, and open that port of machine 0 for the others."


def _name(standing: Standing) -> str:
    return f"rank {standing.rank} (pid {standing.pid}, {standing.device})"


def _waiting(standings: dict[int, Standing], furthest: Standing) -> str:
    there = [rank for rank in sorted(standings) if standings[rank].number == furthest.number]
    return f"rank {there[0]} waits" if len(there) == 1 else f"ranks {', '.join(map(str, there))} wait"


def _ways(device: str) -> str:
    """What to try after a hang or a crash; NCCL's variables mean nothing on a CPU."""
    if device.startswith("cpu"):
        return "Set GLOO_SOCKET_IFNAME to a network of this machine (lo) if its host name leads elsewhere."
    return (
        "Try, one at a time: NCCL_P2P_DISABLE=1 (no copies from card to card), NCCL_SHM_DISABLE=1 (no shared "
        "memory), NCCL_IB_DISABLE=1 (no InfiniBand), NCCL_SOCKET_IFNAME=NAME (which network). NCCL_DEBUG="
        "INFO tells more."
    )
