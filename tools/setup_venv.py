"""Make the project's virtual environment and fill it with the tested versions.

    python tools/setup_venv.py VENV --extras test,dev

Run by `make`, with the standard library alone. A torch that this Python already has, and whose CUDA works
with the machine's driver, is kept; otherwise the version of constraints.txt is installed. What was done, and
why, is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

# A sum on the card, because a driver that is too old shows only when it is used.
PROBE = """
import importlib.util, json
if importlib.util.find_spec("torch") is None:
    print("null")
    raise SystemExit
import torch
problem = ""
try:
    torch.ones(2, device="cuda").sum().item()
except (AssertionError, RuntimeError) as error:
    problem = (str(error).splitlines() or [type(error).__name__])[0]
folder = str(__import__("pathlib").Path(torch.__file__).resolve().parent.parent)
print(json.dumps({"version": torch.__version__, "problem": problem, "folder": folder}))
"""


@dataclass(frozen=True, slots=True)
class Torch:
    """A torch that some Python can import."""

    version: str
    problem: str
    """Why it cannot compute on a GPU here; empty: it can."""
    folder: str
    """The site-packages folder it lies in; empty: the import fails."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether the torch already there stays, and the reason."""

    keep: bool
    why: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--extras", default="test,dev")
    parser.add_argument("--python", default=sys.executable, help="the Python that the environment is made of")
    options = parser.parse_args()
    found = probe(options.python)
    choice = choose(found, allowed=torch_range(), pinned=pinned_torch())
    print(f"torch: {choice.why}", flush=True)
    kept = found if choice.keep else None
    make_venv(options.python, options.venv, kept)
    print(f"installing into {options.venv}: a minute or two, and downloads the first time", flush=True)
    install(options.venv, options.extras, kept)
    installed = probe(str(options.venv / "bin" / "python"))
    if installed is None or not installed.folder or (kept and installed != kept):
        print(f"torch: in {options.venv} it is not what was installed or kept: {installed}")
        return 1
    if installed.problem and has_driver():
        print(
            f"torch: {installed.version} cannot use the GPU of this machine: {installed.problem}\n"
            f"    Update the driver, or install a torch that fits it into {options.python} and remove"
            f" {options.venv}: set-up then keeps that torch. Until then runs are refused or stay on the CPU."
        )
    return 0


def choose(found: Torch | None, allowed: tuple[tuple[int, ...], tuple[int, ...]], pinned: str) -> Choice:
    """Keep a torch that works and that the project supports; anything else is replaced by the pinned one."""
    if found is None:
        return Choice(False, f"none is installed; installing {pinned}")
    if found.problem:
        return Choice(
            False, f"{found.version} is installed, but no use on a GPU ({found.problem}); installing {pinned}"
        )
    lowest, below = allowed
    if not lowest <= version_numbers(found.version) < below:
        wanted = f">={'.'.join(map(str, lowest))},<{'.'.join(map(str, below))}"
        return Choice(False, f"{found.version} is installed, but {wanted} is needed; installing {pinned}")
    return Choice(True, f"{found.version} is installed and works with this machine's driver; it is kept")


def probe(python: str) -> Torch | None:
    """Ask an interpreter for its torch, in its own process: the import may crash on missing libraries."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Torch(version="some version", problem=f"the import fails: {reason}", folder="")
    fields = json.loads(done.stdout.strip().splitlines()[-1])
    return Torch(**fields) if fields else None


def torch_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The supported versions of torch, from pyproject.toml: lowest (in), highest (out)."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (
        re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", line) for line in dependencies if line.startswith("torch>")
    )
    assert bounds, "pyproject.toml gives torch as torch>=A,<B"
    return version_numbers(bounds[1]), version_numbers(bounds[2])


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def pinned_torch() -> str:
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))


def make_venv(python: str, venv: Path, kept: Torch | None) -> None:
    outside = ["--system-site-packages"] if kept else []
    subprocess.run([python, "-m", "venv", "--clear", *outside, str(venv)], check=True)
    if kept and probe(str(venv / "bin" / "python")) is None:
        # Python is itself a virtual environment (many GPU images): its packages are not the system's.
        (site_packages,) = venv.glob("lib/python*/site-packages")
        (site_packages / "outer.pth").write_text(kept.folder + "\n")


def install(venv: Path, extras: str, kept: Torch | None) -> None:
    """Install the project in place, every version pinned, also those that build a source package."""
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "pip", "--constraint", str(CONSTRAINTS)], check=True)
    constraints = venv / "constraints.txt"
    torch = f"torch=={kept.version}" if kept else pinned_torch()
    constraints.write_text(CONSTRAINTS.read_text().replace(pinned_torch(), torch))
    project = f"{ROOT}[{extras}]" if extras else str(ROOT)
    pinned = ["--constraint", str(constraints), "--build-constraint", str(CONSTRAINTS)]
    subprocess.run([*pip, *pinned, "--editable", project], check=True)


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        sys.exit(f"failed with exit code {failed.returncode}: {' '.join(map(str, failed.cmd))}")
