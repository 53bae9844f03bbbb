"""Rules on addresses off this machine: `checkpoint.remote`, and a run or checkpoint there to go on from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from finetune.config.case import Case
from finetune.config.suggest import nearest
from finetune.hub import ID
from finetune.remote.address import HUB, folder_of, is_address, place_in, protocol_of, whole_address
from finetune.secrets import MASK

NO_STORES = {
    "memory": "it ends with the process",
    "data": "nothing can be written there",
    "http": "nothing can be written there",
    "https": "nothing can be written there",
    "hf": "it is written hub://owner/name here",
}
"""Protocols of fsspec that keep no run."""

EXAMPLES = "Write s3://bucket/prefix, gs://bucket/prefix, hub://owner/name or a folder."


def check_remote(case: Case) -> None:
    """Addresses that cannot be, and packages that are not here; whether a store answers is asked later."""
    checkpoint, output = case.config.checkpoint, case.config.output_dir
    if is_address(output):
        why = "a run is written to a folder of this machine, and this is an address"
        fix = "Leave output_dir out, or name a folder; checkpoint.remote=ADDRESS brings the run there."
        case.refuse(f"output_dir={_shown(output)}", why, fix)
    if checkpoint.remote is not None:
        wrong = _wrong(checkpoint.remote) or _inside_output(output, checkpoint.remote)
        if wrong is not None:
            case.refuse(f"checkpoint.remote={_shown(checkpoint.remote)}", *wrong)
    if is_address(checkpoint.resume):
        place = place_in(checkpoint.resume)
        wrong = _wrong(checkpoint.resume if place is None else place.store)
        if wrong is None and place is None:
            fix = "Write STORE/RUN_NAME, or STORE/RUN_NAME/checkpoints/checkpoint-N."
            wrong = ("it names no run in a store", fix)
        if wrong is not None:
            case.refuse(f"checkpoint.resume={_shown(checkpoint.resume)}", *wrong)


def _shown(address: str) -> str:
    """An address for a message: nothing of one that may hold a secret, of whatever shape."""
    return MASK if _may_hold_secret(address) else address


def _may_hold_secret(address: str) -> bool:
    rest = address.removeprefix(f"{protocol_of(address)}://")
    return "?" in rest or ":" in rest.rpartition("@")[0]


def _wrong(address: str) -> tuple[str, str] | None:
    """What is wrong with the address of a store, and what to do."""
    if not address.strip():
        return "it is empty", EXAMPLES
    if address.startswith(HUB):
        name = whole_address(address).removeprefix(HUB)
        return None if ID.fullmatch(name) else ("expected hub://OWNER/NAME", "Write hub://me/my-runs.")
    if "::" in address:
        return "addresses inside addresses are not stores", EXAMPLES
    protocol = protocol_of(address)
    if protocol in NO_STORES:
        return f"{protocol}:// is no store: {NO_STORES[protocol]}", EXAMPLES
    if _may_hold_secret(address):
        fix = "Credentials come from the environment or a login (AWS_ACCESS_KEY_ID, AWS_PROFILE, HF_TOKEN)."
        return "it holds a password or a key, which would be written into the run's folder", fix
    if not address.removeprefix(f"{protocol}://").strip("/"):
        return f"it names no place in {protocol}://", EXAMPLES
    return _unknown(protocol)


def _unknown(protocol: str) -> tuple[str, str] | None:
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol)
    if known is None:
        near = nearest(protocol, known_implementations)
        return f"fsspec knows no {protocol}://", f"Did you mean {near}://?" if near else EXAMPLES
    package = known["class"].partition(".")[0]
    if find_spec(package) is None:
        return f"{protocol}:// needs {package}, which is not installed", f"Install it: pip install {package}"
    return None


def _inside_output(output_dir: str, remote: str) -> tuple[str, str] | None:
    """A store in the folder of all runs would be the runs themselves."""
    folder, runs = folder_of(remote), Path(output_dir).expanduser().absolute()
    if folder is None or folder.resolve() != runs.resolve():
        return None
    return "it is the folder of all runs (output_dir) itself", "Choose another folder, or another machine."
