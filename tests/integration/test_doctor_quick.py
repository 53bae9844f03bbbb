"""`doctor --quick` in a real process: machines written after the documented format of nvidia-smi, bare
interpreters, small and broken surroundings.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from finetune.doctor.cards import card_checks
from finetune.doctor.host import host_checks, shared_memory_check
from finetune.hardware.provider import PROVIDERS
from finetune.hardware.survey import probe_machine
from tests.front_door import REPOSITORY, environment, finetune, wait_for

MACHINES = REPOSITORY / "tests" / "machines"
BARE = (sys.executable, "-S", "-m", "finetune", "doctor", "--quick")
"""Without site-packages: as from a bare clone, and no torch of the tests is looked at."""
SMI = """\
#!/bin/sh
case "$1 $2" in
    "-q -x") test -f said.txt && cat said.txt >&2; test -f smi.xml && cat smi.xml; exit {code} ;;
    "topo -m") cat topo.txt ;;
    "topo -p2p") cat p2p.txt ;;
    "-L ") test -f list.txt && cat list.txt ;;
    *) exit 2 ;;
esac
"""
HANGS = "#!/bin/sh\nsleep 600\n"
FROM_PROVIDERS = {variable for provider in PROVIDERS for variable in provider.variables}
LEFT_OUT = {*FROM_PROVIDERS, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
no_driver_here = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
    reason="this machine has an NVIDIA driver of its own",
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a checklist said."""

    code: int
    answer: dict[str, Any]

    def check(self, name: str) -> dict[str, str]:
        return next(check for check in self.answer["checks"] if check["name"] == name)


def bare_with(module: str, name: str, value: float) -> tuple[str, ...]:
    """`BARE` with another value of a module's constant."""
    program = (
        f"import runpy, sys, {module} as module; module.{name} = {value}; sys.argv[0] = 'finetune'; "
        "runpy.run_module('finetune', run_name='__main__')"
    )
    return (sys.executable, "-S", "-c", program, *BARE[4:])


def doctor(*words: str, at: Path, command: tuple[str, ...] = BARE, **env: str) -> Told:
    """Run it with --json in the folder `at`."""
    base = {name: value for name, value in environment(**env).items() if name in env or name not in LEFT_OUT}
    done = subprocess.run(
        [*command, "--json", *words],
        cwd=at,
        env=base,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return Told(done.returncode, json.loads(done.stdout))


def with_smi(at: Path, machine: str) -> str:
    """A PATH on which nvidia-smi answers as on that machine."""
    folder = MACHINES / machine
    expected = json.loads((folder / "expected.json").read_text())
    script = HANGS if expected.get("hangs") else SMI.format(code=expected.get("code", 0))
    program = at / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\ncd '{folder}' || exit 1\n"))
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("machine", [folder.name for folder in sorted(MACHINES.iterdir())])
def test_each_machine_gets_its_verdicts(machine: str, tmp_path: Path) -> None:
    expected = json.loads((MACHINES / machine / "expected.json").read_text())
    command = bare_with("finetune.hardware.smi", "SECONDS", 2) if expected.get("hangs") else BARE
    told = doctor(at=tmp_path, command=command, PATH=with_smi(tmp_path, machine))
    for name, (status, words) in expected["checks"].items():
        check = told.check(name)
        assert check["status"] == status, check
        assert words in check["detail"]
    for name, words in expected.get("fix", {}).items():
        assert words in told.check(name)["fix"]
    for name, words in expected.get("also", {}).items():
        assert words in told.check(name)["detail"]
    failed = [check["name"] for check in told.answer["checks"] if check["status"] == "fail"]
    assert told.answer["ok"] is (not failed)
    assert told.code == (3 if failed else 0)
    assert all(check["fix"] for check in told.answer["checks"] if check["status"] == "fail")
    if "links" not in expected["checks"]:
        assert [check["name"] for check in told.answer["checks"]].count("GPUs") == 1
        assert (
            told.answer["checks"][1]["name"] == "RAM"
        )  # nothing else can be said of cards that do not answer


def test_only_cards_in_sight_are_judged(tmp_path: Path) -> None:
    path = with_smi(tmp_path, "4x_a100_pcie")
    near = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="2,3")
    assert near.check("links")["status"] == "pass"
    assert "PXB" in near.check("links")["detail"]
    assert "CUDA_VISIBLE_DEVICES=2,3 leaves 2 of 4" in near.check("GPUs")["detail"]
    far = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="0,3")
    assert far.check("links")["status"] == "warn"
    none = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="")
    assert none.check("GPUs")["status"] == "warn"
    assert "hides all 4 cards" in none.check("GPUs")["detail"]
    assert none.check("GPUs")["fix"] == "unset CUDA_VISIBLE_DEVICES"


def test_the_record_holds_the_machine(tmp_path: Path) -> None:
    machine = doctor(at=tmp_path, PATH=with_smi(tmp_path, "2x_rtx3090_nvlink")).answer["machine"]
    assert machine["smi"]["driver"] == "580.95.05"
    assert [card["total_bytes"] for card in machine["smi"]["cards"]] == [24576 * 2**20] * 2
    assert machine["links"]["ways"] == [["X", "NV4"], ["NV4", "X"]]
    assert machine["host"]["memory_bytes"] > 2**28
    assert machine["host"]["disk"]["folder"] == str(tmp_path / "runs")


@pytest.mark.parametrize(("machine", "cards"), [("8x_h100_sxm", 8), ("4x_rtx4090", 4)])
def test_the_checklist_fits_a_terminal_and_ends_with_a_verdict(
    machine: str, cards: int, tmp_path: Path
) -> None:
    env = environment(PATH=with_smi(tmp_path, machine))
    done = subprocess.run(
        [*BARE, "output_dir=/runs"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith(f" 1 pass  GPUs           {cards}x NVIDIA")
    assert sum(line.strip().startswith("GPU") and line.rstrip().count("-") == 1 for line in lines) == cards
    assert "\x1b" not in done.stdout
    verdict = done.stdout.rpartition("\n\n")[2]
    assert " passed, " in verdict
    assert " failed: " in verdict


def test_it_knows_no_run_and_one_key(tmp_path: Path) -> None:
    run = finetune("doctor", "--quick", "runs/x", at=tmp_path)
    assert run.code == 2
    assert "'runs/x' is no key=value" in run.err
    key = finetune("doctor", "--quick", "recipe=tiny_lora", at=tmp_path)
    assert key.code == 2
    assert "its one key is output_dir=FOLDER" in key.err
    there = doctor(f"output_dir={tmp_path / 'a' / 'b'}", at=tmp_path)
    assert there.answer["machine"]["host"]["disk"]["nearest"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing was made to measure the disk


def bare_interpreters() -> list[str]:
    """This one and other versions, as far as they are installed."""
    versions = Path.home() / ".pyenv" / "versions"
    known = [shutil.which("python3.10"), *map(str, versions.glob("3.10.*/bin/python"))]
    for candidate in filter(None, known):
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return [sys.executable, candidate]
    return [sys.executable]


@no_driver_here
@pytest.mark.parametrize("python", bare_interpreters())
def test_a_bare_interpreter_is_enough(python: str, tmp_path: Path) -> None:
    code = (
        f"import sys, runpy; sys.path.insert(0, {str(REPOSITORY)!r}); "
        "sys.argv = ['finetune', *sys.argv[1:]]; runpy.run_module('finetune', run_name='__main__')"
    )
    told = doctor(at=tmp_path, command=(python, "-I", "-S", "-c", code, "doctor", "--quick"))
    assert told.check("GPUs")["detail"] == "no NVIDIA driver; models marked for a CPU train here"
    assert told.check("GPUs")["status"] == "pass"
    assert told.check("Python")["status"] in ("pass", "fail")
    assert told.answer["machine"]["host"]["python"] in ([3, 10], list(sys.version_info[:2]))


def in_namespace(*words: str, prepare: str, at: Path, **env: str) -> Told:
    """The same with mounts or a network of its own, which end with it."""
    unshare = ("unshare", *words, "sh", "-ec", f'{prepare}\nexec "$@"', "sh")
    tried = subprocess.run([*unshare, "true"], cwd=at, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"unshare is not permitted here: {tried.stderr.strip()}")
    return doctor(at=at, command=(*unshare, *BARE), **env)


@pytest.mark.parametrize(("machine", "status"), [("8x_h100_sxm", "fail"), ("rtx4090_x4", "warn")])
def test_the_shared_memory_of_a_plain_container(machine: str, status: str, tmp_path: Path) -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    told = in_namespace("-rm", prepare=small, at=tmp_path, PATH=with_smi(tmp_path, machine))
    check = told.check("/dev/shm")
    assert (check["status"], "(64 MiB)" in check["detail"]) == (status, True)
    assert "--shm-size" in check["fix"]
    assert status != "fail" or told.code == 3
    assert "docker's own default" in check["detail"]
    smaller = in_namespace("-rm", prepare=small.replace("64m", "32m"), at=tmp_path).check("/dev/shm")
    assert (smaller["status"], "docker" in smaller["detail"]) == ("warn", False)


def test_a_measured_exchange_outweighs_little_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", with_smi(tmp_path, "8x_h100_sxm"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = probe_machine(tmp_path)
    small = replace(report, host=replace(report.host, shared_memory_bytes=64 * 2**20))
    forecast, measured = shared_memory_check(small), shared_memory_check(small, exchanged=True)
    assert (forecast.status, measured.status) == ("fail", "warn")
    assert "docker's own default (64 MiB)" in measured.detail
    assert "--shm-size" in measured.fix


def test_cards_of_two_kinds_are_named_by_uuid_unless_cuda_counts_them_by_bus(tmp_path: Path) -> None:
    path = with_smi(tmp_path, "mixed_old")
    one = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="1").check("same kind")
    assert "which of them CUDA_VISIBLE_DEVICES=1 means is not known" in one["detail"]
    assert one["fix"].endswith("CUDA_VISIBLE_DEVICES=GPU-7f1b103c")
    known = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert known.answer["machine"]["in_sight"] == [1]
    assert known.check("GPUs")["detail"].startswith("1x Tesla V100")
    named = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="GPU-65dc9f50")
    assert named.answer["machine"]["in_sight"] == [1]
    both = doctor(at=tmp_path, PATH=path, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert both.check("same kind")["fix"].endswith("CUDA_VISIBLE_DEVICES=0")


def test_a_slice_is_found_on_its_own_card_with_its_own_memory(tmp_path: Path) -> None:
    path = with_smi(tmp_path, "a100_mig")
    told = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="MIG-b0a7c1f4-5d0b-5c25-8a8e-5a2f7a0f3f77")
    assert "CUDA_VISIBLE_DEVICES names one of 20.9 GB of GPU 0" in told.check("MIG")["detail"]
    assert "85.9 GB" not in told.check("RAM")["detail"]
    unknown = doctor(at=tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="MIG-11111111-5d0b-5c25-8a8e-5a2f7a0f3f77")
    assert unknown.check("GPUs")["status"] == "warn"
    assert "of which card this is a slice nvidia-smi does not tell" in unknown.check("GPUs")["detail"]
    assert unknown.answer["machine"]["in_sight"] == []


@no_driver_here
def test_a_driver_or_a_card_without_the_other(tmp_path: Path) -> None:
    driver = (
        "mount -t tmpfs tmpfs /proc/driver\nmkdir /proc/driver/nvidia\necho 580 >/proc/driver/nvidia/version"
    )
    told = in_namespace("-rm", prepare=driver, at=tmp_path).check("GPUs")
    assert (told["status"], "nvidia-smi is not on PATH" in told["detail"]) == ("warn", True)
    card = "D=/sys/bus/pci/devices\nmount -t tmpfs tmpfs $D\nmkdir $D/a $D/b\necho 0x10de >$D/a/vendor\n"
    card += "echo 0x030200 >$D/a/class\necho 0x10de >$D/b/vendor\necho 0x0c0330 >$D/b/class"
    told = in_namespace("-rm", prepare=card, at=tmp_path).check("GPUs")
    assert (told["status"], told["detail"]) == ("fail", "1 NVIDIA card on the PCI bus, and no driver")


def test_a_disk_that_is_too_small_or_full(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    small = f"mount -t tmpfs -o size=16m tmpfs {runs}"
    told = in_namespace("-rm", prepare=small, at=tmp_path)
    assert told.check("disk")["status"] == "warn"  # the smallest run fits
    assert told.check("run folder")["status"] == "warn"
    assert "is in RAM" in told.check("run folder")["detail"]
    full = f"{small}\ndd if=/dev/zero of={runs}/filler bs=1M count=20 2>/dev/null || true"
    told = in_namespace("-rm", prepare=full, at=tmp_path)
    assert (told.code, told.check("disk")["status"]) == (3, "fail")
    assert "0.0 MB free" in told.check("disk")["detail"]
    assert told.check("disk")["fix"].startswith("Free space")
    assert told.check("disk speed")["status"] == "warn"  # it was not measured
    locked = f"{small}\nmount -o remount,ro {runs}"
    told = in_namespace("-rm", prepare=locked, at=tmp_path)
    assert "Read-only file system" in told.check("disk")["detail"]
    assert told.check("disk")["fix"] == "Set output_dir to a folder that can be written."
    assert "disk speed" not in [check["name"] for check in told.answer["checks"]]


def test_a_disk_that_takes_no_more_files_or_is_short(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    few = f"mount -t tmpfs -o size=60g,nr_inodes=500 tmpfs {runs}"
    check = in_namespace("-rm", prepare=few, at=tmp_path).check("disk")
    assert (check["status"], "more files can be made" in check["detail"]) == ("fail", True)
    short = f"mount -t tmpfs -o size=30g tmpfs {runs}"
    path = with_smi(tmp_path, "rtx4090_x4")
    check = in_namespace("-rm", prepare=short, at=tmp_path, PATH=path).check("disk")
    assert (check["status"], "less than 50 GB" in check["detail"]) == ("warn", True)


def test_a_folder_inside_a_container_goes_with_it(tmp_path: Path) -> None:
    layers = "mkdir -p lower upper work runs\n"
    layers += "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work runs"
    check = in_namespace("-rm", prepare=layers, at=tmp_path).check("run folder")
    assert (check["status"], "lies in the container (overlay)" in check["detail"]) == ("warn", True)
    assert "docker run -v" in check["fix"]


def test_a_host_that_is_small_beside_its_cards(tmp_path: Path) -> None:
    limits = {"cpu.max": "100000 100000", "memory.max": str(2**30), "memory.current": str(2**30 - 2**20)}
    written = "\n".join(f"echo {value} >/sys/fs/cgroup/{name}" for name, value in limits.items())
    small = f"mount -t tmpfs tmpfs /sys/fs/cgroup\n{written}\nmount -t tmpfs -o size=512m tmpfs /dev/shm"
    bare = in_namespace("-rm", prepare=small, at=tmp_path)
    assert (bare.check("RAM")["status"], "top -o %MEM" in bare.check("RAM")["fix"]) == ("warn", True)
    assert (bare.check("CPU cores")["status"], bare.check("/dev/shm")["status"]) == ("pass", "pass")
    told = in_namespace("-rm", prepare=small, at=tmp_path, PATH=with_smi(tmp_path, "4x_rtx4090"))
    assert (told.check("RAM")["status"], "the cards have 103.0 GB" in told.check("RAM")["detail"]) == (
        "warn",
        True,
    )
    assert told.check("CPU cores")["status"] == "warn"
    assert "0.25 for each card" in told.check("CPU cores")["detail"]
    assert (told.check("/dev/shm")["status"], "little for" in told.check("/dev/shm")["detail"]) == (
        "warn",
        True,
    )


HOURS = 3600
UNSTAGED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "an old C library": ({"glibc": (2, 17)}, "C library", "fail", "torch needs 2.28"),
    "another C library": ({"glibc": None}, "C library", "warn", "not glibc"),
    "a clock that was never set": ({"now": 3.0}, "clock", "fail", "1970-01-01 00:00 UTC cannot be"),
    "a clock that is behind": (
        {"files_are_from": time.time() + 72 * HOURS},
        "clock",
        "fail",
        "is before the files",
    ),
    "files of another time zone": ({"files_are_from": time.time() + 9 * HOURS}, "clock", "pass", ""),
    "an old Python alone": (
        {"python": (3, 9), "other_python": ""},
        "Python",
        "fail",
        "3.11 to 3.13 is needed",
    ),
    "a new Python beside it": (
        {"python": (3, 9), "other_python": "python3.12"},
        "Python",
        "pass",
        "python3.12",
    ),
    "a Python that is too new": ({"python": (3, 14), "other_python": ""}, "Python", "fail", "3.14"),
    "no limit of open files": ({"open_files": -1}, "open files", "pass", "no limit"),
}


@pytest.mark.parametrize("case", UNSTAGED)
def test_what_cannot_be_staged_here(case: str, tmp_path: Path) -> None:
    changed, name, status, words = UNSTAGED[case]
    report = probe_machine(tmp_path)
    checks = host_checks(replace(report, host=replace(report.host, **changed)))
    check = next(check for check in checks if check.name == name)
    assert (check.status, words in check.detail) == (status, True), check


@pytest.mark.parametrize(("speed", "status"), [(50e6, "warn"), (500e6, "pass"), (None, "warn")])
def test_a_slow_disk_is_told_in_minutes(speed: float | None, status: str, tmp_path: Path) -> None:
    report = probe_machine(tmp_path)
    disk = replace(report.host.disk, write_bytes_s=speed)
    checks = host_checks(replace(report, host=replace(report.host, disk=disk)))
    check = next(check for check in checks if check.name == "disk speed")
    assert check.status == status
    assert (speed == 50e6) is ("100 GB of checkpoints take 33 minutes" in check.detail)


@pytest.mark.parametrize(
    ("torch", "cuda", "status", "words"),
    [
        (False, None, "warn", "a torch for CUDA 13 would not run"),
        (True, None, "warn", "the torch of this Python is built without CUDA"),
        (True, "13.0", "fail", "needs CUDA 13.0, and the driver runs up to CUDA 12"),
        (True, "12.8", "pass", ""),
    ],
)
def test_a_torch_that_is_there_is_held_against_the_driver(
    torch: bool, cuda: str | None, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", with_smi(tmp_path, "4x_rtx4090"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = replace(probe_machine(tmp_path), torch=torch, torch_cuda=cuda)
    check = next(check for check in card_checks(report) if check.name == "driver")
    assert (check.status, words in check.detail) == (status, True), check


def test_an_interruption_leaves_no_nvidia_smi_that_hangs(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho $$ >{tmp_path}/begun\nmv {tmp_path}/begun {tmp_path}/pid\nexec sleep 600\n"
    )
    program.chmod(0o755)
    env = environment(PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    pipe = subprocess.PIPE
    command = bare_with("finetune.commands.doctor", "SILENT_SECONDS", 0.5)
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for("nvidia-smi", (tmp_path / "pid").exists)
        group = int((tmp_path / "pid").read_text())
        assert process.stderr is not None
        assert "nvidia-smi may take a minute" in process.stderr.readline()
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "")
    assert "interrupted" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_it_needs_no_network(tmp_path: Path) -> None:
    told = in_namespace("-rn", prepare=":", at=tmp_path)
    assert told.check("clock")["status"] == "pass"


@pytest.mark.parametrize(("limit", "words"), [(200, "loader processes"), (2048, "little for several")])
def test_few_open_files(limit: int, words: str, tmp_path: Path) -> None:
    told = doctor(at=tmp_path, command=("sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh", *BARE))
    check = told.check("open files")
    assert (check["status"], words in check["detail"]) == ("warn", True)
    assert f"{limit:,}" in check["detail"]
    assert check["fix"].startswith("ulimit -n ")
    hard = doctor(at=tmp_path, command=("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *BARE))
    assert "--ulimit nofile" in hard.check("open files")["fix"]  # this shell may not raise it


@pytest.mark.parametrize(
    ("variable", "folder", "status", "words", "provider"),
    [
        ("RUNPOD_POD_ID", "/root/runs", "warn", "output_dir=/workspace/runs", "RunPod"),
        ("RUNPOD_POD_ID", "/workspace/runs", "warn", "once a volume is mounted there", "RunPod"),
        ("VAST_CONTAINERLABEL", "/root/runs", "pass", "", "Vast.ai"),
        ("COLAB_RELEASE_TAG", "/content/runs", "warn", "=/content/drive/MyDrive/runs", "Google Colab"),
        ("KAGGLE_KERNEL_RUN_TYPE", "/kaggle/working/runs", "warn", "Ask for it", "Kaggle"),
        ("SM_TRAINING_ENV", "/opt/ml/checkpoints/x", "warn", "Ask for it", "SageMaker training job"),
        ("SAGEMAKER_APP_TYPE", "/root/runs", "warn", "=/home/sagemaker-user/runs", "SageMaker Studio"),
        ("DATABRICKS_RUNTIME_VERSION", "/root/runs", "warn", "=/Volumes/runs", "Databricks"),
        ("MODAL_TASK_ID", "/root/runs", "warn", "checkpoint.remote=", "Modal"),
    ],
)
def test_a_folder_that_is_erased_with_the_machine(
    variable: str, folder: str, status: str, words: str, provider: str, tmp_path: Path
) -> None:
    told = doctor(f"output_dir={folder}", at=tmp_path, **{variable: "x"})
    check = told.check("run folder")
    assert check["status"] == status, check
    assert words in check["fix"]
    assert told.check("provider")["detail"].startswith(f"{provider}: ")
    stops = provider in ("Google Colab", "Kaggle", "Modal")  # by itself
    assert (told.check("provider")["status"] == "warn") is stops


def test_a_volume_that_is_mounted_in_a_kept_folder_is_kept_also_behind_a_link(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = "mount -t tmpfs tmpfs /opt\nmkdir -p /opt/ml/output/data\n"
    mounted += f"mount --bind {volume} /opt/ml/output/data"
    (tmp_path / "runs").symlink_to("/opt/ml/output/data")
    told = in_namespace("-rm", prepare=mounted, at=tmp_path, SM_TRAINING_ENV="{}").check("run folder")
    assert (told["status"], "outlives a stop" in told["detail"]) == ("pass", True), told


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Path]:
    """A folder for PATH that has a shell's basics and no compiler."""
    folder = tmp_path / "tools"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@no_driver_here
def test_missing_tools_are_named(tools: Path, tmp_path: Path) -> None:
    check = doctor(at=tmp_path, PATH=str(tools)).check("compiler")
    assert (check["status"], check["fix"]) == ("warn", "sudo apt-get install build-essential")
    assert check["detail"].startswith("make and g++ missing")
    (tools / "g++").symlink_to("/bin/true")
    assert doctor(at=tmp_path, PATH=str(tools)).check("compiler")["detail"].startswith("make missing")


def test_what_a_container_may_use_is_what_counts(tmp_path: Path) -> None:
    limits = {"cpu.max": "50000 100000", "memory.max": str(2**30), "memory.current": str(2**29)}
    written = "\n".join(f"echo {value} >/sys/fs/cgroup/{name}" for name, value in limits.items())
    prepare = f"mount -t tmpfs tmpfs /sys/fs/cgroup\n{written}"
    newer = in_namespace("-rm", prepare=prepare, at=tmp_path).answer["machine"]["host"]
    assert (newer["cores"], newer["memory_bytes"], newer["free_memory_bytes"]) == (0.5, 2**30, 2**29)
    older = {
        "cpu/cpu.cfs_quota_us": 25000,
        "cpu/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": 2**31,
        "memory/memory.usage_in_bytes": 2**31,
    }
    written = "\n".join(f"echo {value} >/sys/fs/cgroup/{name}" for name, value in older.items())
    prepare = (
        f"mount -t tmpfs tmpfs /sys/fs/cgroup\nmkdir /sys/fs/cgroup/cpu /sys/fs/cgroup/memory\n{written}"
    )
    host = in_namespace("-rm", prepare=prepare, at=tmp_path).answer["machine"]["host"]
    assert (host["cores"], host["memory_bytes"], host["free_memory_bytes"]) == (0.25, 2**31, 0)


def test_clouds_are_known_by_the_name_of_their_machines(tmp_path: Path) -> None:
    prepare = "mount -t tmpfs tmpfs /sys/class\nmkdir -p /sys/class/dmi/id\necho {} >/sys/class/dmi/id/{}"
    amazon = in_namespace("-rm", prepare=prepare.format("Amazon EC2", "sys_vendor"), at=tmp_path)
    assert amazon.check("provider")["detail"].startswith("Amazon EC2: ")
    tag = "7783-7084-3265-9085-8269-3286-77"
    azure = in_namespace("-rm", prepare=prepare.format(tag, "chassis_asset_tag"), at=tmp_path)
    assert azure.check("provider")["detail"].startswith("Microsoft Azure: ")
    other = in_namespace("-rm", prepare=prepare.format("Dell Inc.", "sys_vendor"), at=tmp_path)
    assert other.check("provider")["detail"].startswith("none that is known")


def test_colour_is_for_a_terminal_that_wants_it(tmp_path: Path) -> None:
    assert "\x1b[32mpass\x1b[0m  CPU cores" in on_terminal(tmp_path, TERM="xterm")
    assert "\x1b" not in on_terminal(tmp_path, NO_COLOR="1")
    assert "\x1b" not in on_terminal(tmp_path, TERM="dumb")


def on_terminal(at: Path, **env: str) -> str:
    """What the checklist prints to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(BARE, cwd=at, env=environment(**env), stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        printed = b""
        with suppress(OSError):  # its end is an error on Linux
            while part := os.read(ours, 4096):
                printed += part
    os.close(ours)
    assert process.returncode in (0, 3)
    return printed.decode()
