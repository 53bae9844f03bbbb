"""What a failure is taken for: documented words of libraries, and which of several is the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.config.facts import save_facts
from finetune.config.saved import save_config
from finetune.distributed.launch import Ended
from finetune.paths import RunDir
from finetune.planner.answer import answer
from finetune.planner.record import as_record
from finetune.training.causes import CAUSES
from finetune.training.diagnosis import Before, Diagnosis, diagnose, look_before

LOGS = Path(__file__).parent / "logs"
ABORTED = Ended(1, 1, "The process was ended by SIGABRT; it could say nothing.", "SIGABRT")
CANNOT_USE = "the driver shows a GPU, but torch cannot use it."
UNKNOWN = "Traceback (most recent call last):\nValueError: a fault of this program"

TELLS = {
    "gpu_memory": (
        "2.00 GiB more were asked for",
        "4.91 GiB in free pieces",
        "planned (ddp), in GB: weights",
        "end process 4711",
    ),
    "gpu_fault": ("uncorrectable ECC error", "replace the machine"),
    "gpu_fabric": ("CUDA error 802", "nvidia-fabricmanager"),
    "gpu_driver": ("found version 11040", "a newer driver"),
    "gpu_kernels": ("capability sm_120", "get_arch_list"),
    "gpu_assert": ("srcIndex < srcSelectDimSize", "CUDA_LAUNCH_BLOCKING=1"),
    "gpu_access": ("an illegal memory access", "CUDA_LAUNCH_BLOCKING=1"),
    "shared_memory": ("/dev/shm has", "--shm-size=16g", "NCCL_SHM_DISABLE=1"),
    "nccl_timeout": (
        "rank 1 waited in ALLREDUCE (number 118) for 1,800 s",
        "ranks 0, 2, 3 did not say so",
        "trainer.ddp_timeout=7200",
    ),
    "nccl_error": ("ncclSystemError: Call to ibv_create_qp failed", "NCCL_DEBUG=INFO", "NCCL_IB_DISABLE=1"),
    "lost_process": ("rank 1 lost the connection", "checkpoint.resume=auto"),
    "gloo_timeout": ("Timed out waiting 1800000ms", "trainer.ddp_timeout=7200"),
    "port_in_use": ("port: 29500", "launch.main_process_port"),
    "hub_access": ("Access to model google/gemma-2-2b-it is restricted", "HF_TOKEN"),
    "host_memory": ("GB of RAM are here", "a machine with more RAM"),
    "disk_full": ("/ (the file that was written", "take a larger disk"),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Before:
    """A run of four cards that was planned, and has not started."""
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    run_dir.logs.mkdir()
    found = answer(["recipe=qwen8b_full", "hardware=4x_a100_80gb", "distributed=ddp"])[0]
    save_config(found.plan.chosen.config, run_dir.config)
    save_facts(found.plan.chosen.facts, run_dir.facts)
    run_dir.plan.write_text(json.dumps(as_record(found.plan, found.config)), encoding="utf-8")
    return look_before(run_dir)


@pytest.fixture
def before(planned: Before) -> Before:
    for file in planned.run_dir.logs.iterdir():
        file.unlink()
    return planned


def failed(before: Before, rank: int, told: str, time: float = 1.0, code: int = 1) -> None:
    content = {"rank": rank, "time": time, "exit_code": code, "told": told}
    before.run_dir.failure(rank).write_text(json.dumps(content), encoding="utf-8")


def documented(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def of_record(before: Before, name: str) -> Diagnosis | None:
    """Rank 1 has said what is documented: in its traceback, or in its log before it could say no more."""
    text = documented(name)
    if "Traceback" in text:
        failed(before, 1, text)
        return diagnose(before)
    before.run_dir.log(1).write_text(text, encoding="utf-8")
    if name in ("gpu_fabric", "gpu_driver"):
        failed(before, 1, CANNOT_USE, code=2)
        return diagnose(before)
    return diagnose(before, ABORTED)


@pytest.mark.parametrize("name", sorted(file.stem for file in LOGS.glob("*.log")))
def test_documented_words_are_recognised_and_told_with_figures(name: str, before: Before) -> None:
    found = of_record(before, name)
    assert found is not None
    assert (found.cause, found.rank) == (name, 1)
    told = " ".join(" ".join(found.lines).split())
    for part in TELLS[name]:
        assert part in told
    assert found.lines[0].startswith("diagnosis rank 1")
    assert 0 < len(found.advice) <= 3
    assert json.loads(json.dumps(found.record)) == found.record


def test_every_cause_that_has_words_of_its_own_is_documented_or_produced_for_real() -> None:
    produced = {"killed", "crashed", "illegal_instruction"}
    assert {cause.name for cause in CAUSES} == set(TELLS) | produced
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize(
    ("signal", "cause"),
    [
        ("SIGKILL", "killed"),
        ("SIGSEGV", "crashed"),
        ("SIGILL", "illegal_instruction"),
        ("SIGBUS", "shared_memory"),
    ],
)
def test_a_signal_that_leaves_no_words_is_recognised(signal: str, cause: str, before: Before) -> None:
    before.run_dir.log(1).write_text("step 1/3\n", encoding="utf-8")
    failed(before, 0, documented("lost_process"))
    found = diagnose(before, Ended(1, 1, f"The process was ended by {signal}; it could say nothing.", signal))
    assert found is not None
    assert (found.cause, found.rank) == (cause, 1)


def test_of_a_launcher_that_was_killed_the_ranks_losses_are_only_the_consequence(before: Before) -> None:
    failed(before, 1, documented("lost_process"))
    found = diagnose(before, Ended(1, None, "The launcher was ended by SIGKILL.", "SIGKILL"))
    assert found is not None
    assert (found.cause, found.rank) == ("killed", None)
    assert found.told.startswith("the launcher was killed by SIGKILL")


def test_the_cause_is_told_and_not_its_consequence_although_that_came_first(before: Before) -> None:
    failed(before, 0, documented("lost_process"), time=1.0)
    failed(before, 2, documented("nccl_error"), time=2.0)
    failed(before, 3, documented("gpu_memory"), time=3.0)
    found = diagnose(before)
    assert found is not None
    assert (found.cause, found.rank) == ("gpu_memory", 3)


def test_of_two_causes_the_earlier_one_is_told(before: Before) -> None:
    failed(before, 0, documented("disk_full"), time=2.0)
    failed(before, 1, documented("gpu_fault"), time=1.0)
    found = diagnose(before)
    assert found is not None
    assert (found.cause, found.rank) == ("gpu_fault", 1)


def test_nothing_is_guessed_of_an_unknown_failure_and_nothing_is_added_to_a_message_of_ours(
    before: Before,
) -> None:
    failed(before, 1, UNKNOWN, time=1.0)
    failed(before, 0, documented("lost_process"), time=2.0)
    before.run_dir.log(1).write_text(documented("shared_memory"), encoding="utf-8")  # it went on after that
    assert diagnose(before) is None
    failed(before, 1, "1 problem in the model:\n  address already in use: a message of ours", code=2)
    assert diagnose(before) is None


def test_what_an_earlier_start_has_logged_is_not_looked_at(before: Before) -> None:
    before.run_dir.log(1).write_text(documented("nccl_timeout"), encoding="utf-8")
    assert diagnose(before, ABORTED) is not None
    assert diagnose(look_before(before.run_dir), ABORTED) is None


def test_what_can_be_changed_is_named_with_the_numbers_of_the_run(before: Before) -> None:
    failed(before, 1, "Traceback (most recent call last):\nRuntimeError: CUDA error: out of memory")
    found = diagnose(before)
    assert found is not None
    saved = before.run_dir.plan.read_text(encoding="utf-8")
    plan = json.loads(saved)
    assert not plan["fits"]  # what the planner has advised comes first
    assert found.advice == tuple(plan["advice"][:3])
    before.run_dir.plan.write_text(json.dumps({**plan, "advice": []}), encoding="utf-8")
    found = diagnose(before)
    before.run_dir.plan.write_text(saved, encoding="utf-8")
    assert found is not None
    ways = " ".join(found.advice)
    now = next(option for option in plan["strategies"] if option["strategy"] == "ddp")["gpu"]["needed"]
    assert f"GB of a card planned, now {now / 1e9:,.1f})" in ways
    assert "data.max_length=" in ways
