"""What is said of processes that hang, and of one that ended."""

from __future__ import annotations

from pathlib import Path

from finetune.config.schema import LaunchConfig
from finetune.distributed.launch import Ended
from finetune.doctor.collective import JOINING, LOADING, Standing
from finetune.doctor.hangs import crash_check, last_words, told_hang
from finetune.paths import RunDir


def standing(rank: int, stage: str, number: int) -> Standing:
    return Standing(rank, 1000 + rank, f"cuda:{rank}", stage, number)


def hang(*standings: Standing, stopped: int | None = None) -> tuple[str, str]:
    """What is told of two processes of one host after a minute."""
    halted = frozenset() if stopped is None else frozenset({stopped})
    return told_hang({s.rank: s for s in standings}, range(2), halted, "after 60 s", LaunchConfig())


def test_the_rank_that_is_behind_keeps_the_others_waiting() -> None:
    why, fix = hang(standing(0, "all-reduce of 64 MiB", 9), standing(1, "all-reduce of 1 MiB", 6))
    never = "rank 1 (pid 1001, cuda:1) never came to 'all-reduce of 64 MiB', where rank 0 waits"
    assert why == f"{never}; after 60 s it was in 'all-reduce of 1 MiB'"
    for name in ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME"):
        assert name in fix


def test_a_stopped_process_is_the_culprit_even_where_others_are_behind_it() -> None:
    ranks = standing(0, "all-reduce of 1 MiB", 6), standing(1, "all-gather of 1 MiB", 7)
    why, fix = hang(*ranks, stopped=1)
    assert "rank 1 (pid 1001, cuda:1) does not go on in 'all-gather of 1 MiB'" in why
    assert fix == "kill -CONT 1001 lets such a process go on."


def test_where_all_wait_in_the_same_place_no_rank_is_blamed() -> None:
    why, fix = hang(standing(0, "the first exchange", 5), standing(1, "the first exchange", 5))
    assert why == "all 2 ranks wait in 'the first exchange' after 60 s: none is behind"
    assert "NCCL_P2P_DISABLE=1" in fix


def test_a_rank_that_never_began_or_still_loads_is_no_matter_of_links() -> None:
    assert "rank 1 said nothing after 60 s: its process did not begin" in hang(standing(0, JOINING, 2))[0]
    why, fix = hang(standing(0, JOINING, 2), standing(1, LOADING, 1))
    assert "rank 1 (pid 1001, cuda:1) never came to 'joining the others'" in why
    assert "slow or hanging disk" in fix
    assert hang(standing(0, LOADING, 1), standing(1, LOADING, 1))[1] == fix


def test_machines_that_do_not_meet_are_sent_to_the_port_of_machine_0() -> None:
    launch = LaunchConfig(num_machines=2, machine_rank=1, main_process_ip="10.0.0.1")
    for alone in ({}, {2: standing(2, JOINING, 2)}):
        why, fix = told_hang(alone, range(2, 3), frozenset(), "after 60 s", launch)
        assert "waits for the others, which are to meet at 10.0.0.1:29500" in why
        assert "open that port" in fix
    elsewhere = told_hang({2: standing(2, "x", 6)}, range(2, 3), frozenset(), "after 60 s", launch)[0]
    assert "those of other machines are not seen from here" in elsewhere


def test_a_crash_is_told_with_rank_place_and_last_words() -> None:
    frames = 'Traceback (most recent call last):\n  File "x.py", line 1, in run\n    work()\n    ^^^^^^\n'
    told = f"{frames}torch.OutOfMemoryError: CUDA out of memory.\nIt tried 1 GiB.\n"
    ranks = {1: standing(1, "all-reduce of 1 GiB", 11)}
    where = "rank 1 (pid 1001, cuda:1) ended in 'all-reduce of 1 GiB'"
    plain = crash_check(Ended(1, 1, told), ranks, "")
    assert plain.detail == f"{where}: torch.OutOfMemoryError: CUDA out of memory. It tried 1 GiB."
    assert plain.fix == "See what else is on that card (nvidia-smi): end it, or leave the card out."
    failed = f"{frames}torch.distributed.DistBackendError: unhandled system error\n"
    warned = crash_check(Ended(1, 1, failed), ranks, "NCCL on rank 1: connection refused")
    assert warned.detail.endswith("unhandled system error. NCCL on rank 1: connection refused")
    assert "NCCL_P2P_DISABLE=1" in warned.fix


def test_the_last_warning_of_nccl_is_found_in_a_log(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.logs.mkdir()
    folder.log(0).write_text("loading\n")
    lines = ("first", "Call to connect returned Connection timed out")
    folder.log(1).write_text("".join(f"box:7:9 [1] misc/socket.cc:484 NCCL WARN {line}\n" for line in lines))
    assert last_words(folder, range(2)) == f"NCCL on rank 1: {lines[1]}"
