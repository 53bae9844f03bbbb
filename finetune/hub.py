"""Is the Hugging Face hub within reach right now, what is here of it, and how does a model get there?

Its clients retry for minutes before they say no, so one look at the door comes first.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from finetune.errors import Problem, RunFailed

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""`owner/name`: what a hub id looks like."""

DOOR_SECONDS = 5.0


def endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, or the public one."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def commit_of_data_set(name: str, revision: str | None) -> str | None:
    """The commit that a data set's branch or tag stands for now."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint()).dataset_info(name, revision=revision).sha


@cache
def reachable() -> bool:
    """Tell whether the hub answers; True behind a proxy, where only a real request can tell."""
    if any(
        os.environ.get(key, "").upper() in {"1", "ON", "YES", "TRUE"}
        for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    ):
        return False
    address = urlsplit(endpoint())
    if address.scheme in urllib.request.getproxies():
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=DOOR_SECONDS):
            return True
    except OSError:
        return False


def cached(name: str, revision: str | None) -> bool:
    """Tell whether a model's config is in this machine's cache."""
    return cached_config(name, revision) is not None


def cached_config(name: str, revision: str | None) -> Path | None:
    """The config.json of a model in this machine's cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return Path(found) if isinstance(found, str) else None


def cache_folder() -> str:
    """Where the hub's clients keep what they have fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def licence(name: str) -> str | None:
    """What a model's page on the hub says; None where it cannot be asked, or is silent."""
    if not ID.fullmatch(name) or not reachable():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        card = HfApi(endpoint=endpoint()).model_info(name).card_data
    except (HfHubHTTPError, OSError):
        return None
    return card.get("license") if card is not None else None


def check_push(address: str, problems: list[Problem]) -> None:
    """Whether a model could be uploaded to `hub://owner/name`: the address, a login, the way there."""
    name = address.removeprefix("hub://")
    if not address.startswith("hub://") or not ID.fullmatch(name):
        problems.append(Problem(f"--push {address}", "expected hub://OWNER/NAME", "Write hub://me/my-model."))
        return
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    where = f"--push {address}"
    if get_token() is None:
        fix = "Set HF_TOKEN in the environment, or log in with `hf auth login`."
        problems.append(Problem(where, "nobody is logged in to the hub", fix))
    if not reachable():
        fix = "Merge without --push, and upload the folder from a machine with a network."
        problems.append(Problem(where, f"{endpoint()} cannot be reached", fix))
    elif get_token() is not None:
        api = HfApi(endpoint=endpoint())
        try:
            held = api.list_repo_files(name) if api.repo_exists(name) else []
        except (HfHubHTTPError, OSError) as error:
            problems.append(Problem(where, str(error).strip().splitlines()[0], "Check the login's rights."))
            return
        if any(file.endswith((".safetensors", ".bin", ".gguf")) for file in held):
            problems.append(Problem(where, "this repository holds a model already", "Choose another name."))


def push(folder: Path, address: str) -> str:
    """Upload a model's folder, private where the repository is new; compare sizes; return its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    name, api = address.removeprefix("hub://"), HfApi(endpoint=endpoint())
    again = f"it is whole and verified in {folder}; upload it with: hf upload {name} {folder} --private"
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Merged model")
        there = {
            file.rfilename: file.size for file in api.model_info(name, files_metadata=True).siblings or []
        }
    except (HfHubHTTPError, OSError) as error:
        raise RunFailed(f"the model could not be uploaded: {error}\n    {again}") from error
    here = {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }
    wrong = sorted(file for file, size in here.items() if there.get(file) != size)
    if wrong:
        raise RunFailed(f"not whole on the hub: {', '.join(wrong)}\n    {again}")
    return f"{endpoint()}/{name}"
