"""Is the software on this machine the one that was tested?"""

from __future__ import annotations

from collections.abc import Iterator

from finetune.config.packages import installed, version_numbers
from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.paths import assets

CLOSE = ("transformers", "trl", "peft", "accelerate", "deepspeed", "hydra-core", "tokenizers", "safetensors")
"""Packages whose insides this one relies on: another minor version has not been tried."""
ABOUT = ("torch", "bitsandbytes", "datasets", "huggingface-hub", "numpy")
"""Packages of which another version mostly works."""


def version_check() -> Check:
    """The stack against the versions that the tests ran with."""
    tested = dict(_tested())
    far: list[str] = []
    near: list[str] = []
    for name in (*CLOSE, *ABOUT):
        here, wanted = installed(name), tested[name]
        if here == wanted:
            continue
        said = f"{name} {_text(here)} (tested: {_text(wanted)})"
        far_off = here is None or (name in CLOSE and here[:2] != wanted[:2])
        (far if far_off else near).append(said)
    fix = "pip install -c constraints.txt ."
    if far:
        return Check("versions", FAIL, ", ".join([*far, *near]), fix)
    if near:
        return Check("versions", WARN, f"not the ones that were tested: {', '.join(near)}", fix)
    return Check("versions", PASS, f"{len(CLOSE) + len(ABOUT)} packages as tested")


def _tested() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and versions of constraints.txt."""
    for line in (assets() / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if equals:
            yield name, version_numbers(version)


def _text(version: tuple[int, ...] | None) -> str:
    return "is missing" if version is None else ".".join(map(str, version))
