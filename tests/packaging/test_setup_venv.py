"""Set-up keeps a torch that works with the machine's driver, and says what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINNED = next(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
)

# Stands in for a Python and for the Python of the environment that it makes. What `-c` is told about torch
# lies in the file `answer` beside `bin`; `-m pip` writes down what it was asked, and puts a torch where there
# is none.
PYTHON = """#!/bin/sh
home=$(dirname "$0")/..
case "$2" in
venv)
    for venv in "$@"; do :; done
    mkdir -p "$venv/bin" "$venv/lib/python3.12/site-packages"
    echo "$@" > "$venv/venv.log"
    cp "$home/inside" "$venv/answer"
    cp "$home/answer" "$venv/outside"
    cp "$home/pinned" "$venv/pinned"
    cp "$0" "$venv/bin/python" ;;
pip)
    echo "$@" >> "$home/pip.log"
    if grep -q null "$home/answer"; then cp "$home/pinned" "$home/answer"; fi
    exit STATUS ;;
*)
    if [ -e "$home/lib/python3.12/site-packages/outer.pth" ]; then cat "$home/outside"; exit; fi
    if grep -q broken "$home/answer"; then echo "ImportError: libcudart.so is missing" >&2; exit 1; fi
    cat "$home/answer" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a run of the script did."""

    code: int
    said: str
    venv: Path

    @property
    def made_with(self) -> str:
        return (self.venv / "venv.log").read_text()

    @property
    def torch(self) -> str:
        lines = (self.venv / "constraints.txt").read_text().splitlines()
        return next(line for line in lines if line.startswith("torch=="))

    @property
    def outer(self) -> list[str]:
        return [path.read_text().strip() for path in self.venv.rglob("outer.pth")]


def set_up(folder: Path, outside: str, inside: str = "null", status: int = 0) -> SetUp:
    """Run the script with a stand-in Python whose own torch is `outside`, and `inside` in what it makes."""
    python = folder / "machine" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.replace("STATUS", str(status)))
    python.chmod(0o755)
    (folder / "machine" / "answer").write_text(outside)
    (folder / "machine" / "inside").write_text(inside)
    (folder / "machine" / "pinned").write_text(torch("2.13.0"))
    venv = folder / "venv"
    command = [sys.executable, str(ROOT / "tools" / "setup_venv.py"), str(venv), "--python", str(python)]
    done = subprocess.run(command, capture_output=True, text=True)
    return SetUp(done.returncode, done.stdout + done.stderr, venv)


def torch(version: str, problem: str = "") -> str:
    return json.dumps({"version": version, "problem": problem, "folder": "/opt/torch"})


def test_a_torch_that_works_with_the_driver_is_kept(tmp_path: Path) -> None:
    done = set_up(tmp_path, torch("2.11.0+cu130"), inside=torch("2.11.0+cu130"))
    assert done.code == 0, done.said
    assert "--system-site-packages" in done.made_with
    assert done.torch == "torch==2.11.0+cu130"
    assert done.outer == []
    assert "2.11.0+cu130 is installed and works with this machine's driver; it is kept" in done.said


def test_a_working_torch_of_a_python_that_is_itself_an_environment_is_kept(tmp_path: Path) -> None:
    done = set_up(tmp_path, torch("2.12.1+cu130"))
    assert done.code == 0, done.said
    assert done.outer == ["/opt/torch"]
    assert done.torch == "torch==2.12.1+cu130"


@pytest.mark.parametrize(
    ("outside", "why"),
    [
        ("null", f"none is installed; installing {PINNED}"),
        (
            torch("2.12.0+cu130", "The NVIDIA driver on your system is too old"),
            "driver on your system is too old",
        ),
        (torch("2.13.0+cpu", "Torch not compiled with CUDA enabled"), "not compiled with CUDA"),
        (torch("2.4.1+cu121"), "2.4.1+cu121 is installed, but >=2.11,<3 is needed"),
        (torch("3.0.0+cu140"), "3.0.0+cu140 is installed, but >=2.11,<3 is needed"),
        ("broken", "the import fails: ImportError: libcudart.so is missing"),
    ],
    ids=["none", "driver too old", "built without CUDA", "too old", "too new", "broken"],
)
def test_any_other_torch_gives_way_to_the_pinned_one_and_the_reason_is_told(
    tmp_path: Path, outside: str, why: str
) -> None:
    done = set_up(tmp_path, outside)
    assert done.code == 0, done.said
    assert why in done.said
    assert f"installing {PINNED}" in done.said
    assert "--system-site-packages" not in done.made_with
    assert done.torch == PINNED


def test_everything_is_installed_under_the_constraints(tmp_path: Path) -> None:
    done = set_up(tmp_path, "null")
    assert done.code == 0, done.said
    pip, project = (done.venv / "pip.log").read_text().splitlines()
    assert f"pip --constraint {ROOT / 'constraints.txt'}" in pip
    assert f"--constraint {done.venv / 'constraints.txt'}" in project
    assert f"--build-constraint {ROOT / 'constraints.txt'}" in project
    assert f"--editable {ROOT}[test,dev]" in project


def test_a_failed_install_is_a_failed_set_up(tmp_path: Path) -> None:
    done = set_up(tmp_path, "null", status=7)
    assert done.code == 1
    assert "failed with exit code 7" in done.said


def test_a_kept_torch_that_the_environment_replaced_is_a_failed_set_up(tmp_path: Path) -> None:
    done = set_up(tmp_path, torch("2.11.0+cu130"), inside=torch("2.13.0"))
    assert done.code == 1
    assert "not what was installed or kept" in done.said
