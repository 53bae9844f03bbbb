"""Can what the run needs from the hub be had, and is the clock right?"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from finetune import hub
from finetune.config.schema import ModelConfig, RunConfig, SourceConfig
from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.errors import UserError

SKEW_SECONDS = 60.0
"""Signed requests (S3) are refused from 15 minutes, certificates about as late; this is long before."""
PATIENCE_SECONDS = 5.0
ON_THE_HUB = re.compile(r"hf://((?:datasets/)?[^/@]+/[^/@]+)")
"""The repository in an address of the hub's own file system."""
PROXY_REFUSES, BROKEN = 407, 500


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request to the hub came to."""

    trouble: str = ""
    """Why it does not answer; empty: it does."""
    through: str = ""
    """The proxy that was asked, in words."""
    date: str = ""
    """Its clock; empty: not told."""


def network_checks(config: RunConfig) -> list[Check]:
    """The hub where the run needs it, and the clock by the hub's."""
    answer = _ask()
    needed = _from_the_hub(config, reached=not answer.trouble)
    access = [] if answer.trouble else [_access_check(name) for name in needed]
    return [_hub_check(answer, needed), *access, *_clock_check(answer)]


def _ask() -> Answer:
    """One request, through the proxy where there is one: its answer, and its clock."""
    from huggingface_hub.constants import ENV_VARS_TRUE_VALUES

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ENV_VARS_TRUE_VALUES:
            return Answer(f"{name} is set")
    address, proxies = hub.endpoint(), urllib.request.getproxies()
    scheme = urlsplit(address).scheme
    through = f" through the proxy {urlsplit(proxies[scheme]).hostname}" if scheme in proxies else ""
    if not hub.reachable():
        return Answer(f"{address} cannot be reached")
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as found:
            return Answer("", through, found.headers["Date"] or "")
    except urllib.error.HTTPError as error:  # an answer all the same, with a date
        if error.code == PROXY_REFUSES or error.code >= BROKEN:
            return Answer(f"{address} cannot be reached{through}: {error.code} {error.reason}")
        return Answer("", through, error.headers["Date"] or "")
    except (OSError, http.client.HTTPException) as error:
        return Answer(f"{address} cannot be reached{through}: {error}")


def _from_the_hub(config: RunConfig, *, reached: bool) -> list[str]:
    """What the run would fetch: a model whose weights are not here, and data sets.

    A data set is asked of the hub whenever that can be reached; else the cache may have it.
    """
    model = config.model.name_or_path
    away = (
        hub.ID.fullmatch(model)
        and not Path(model).expanduser().exists()
        and not weights_are_here(config.model)
    )
    sources = [source for source in (*config.data.train, *config.data.eval) if name_on_the_hub(source)]
    rows = [name_on_the_hub(source) for source in sources if reached or not _rows_are_here(source)]
    return [*([model] if away else []), *dict.fromkeys(rows)]


def weights_are_here(model: ModelConfig) -> bool:
    """Whether the hub's cache has all that a run loads, not the config alone."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model.name_or_path, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return False
    if model.gguf_file:
        return (folder / model.gguf_file).exists()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return all((folder / part).exists() for part in set(parts))
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def name_on_the_hub(source: SourceConfig) -> str:
    """`datasets/owner/name` of a source that lies on the hub; empty: it does not."""
    address = ON_THE_HUB.match(source.path)
    if address:
        return address[1]
    if "://" in source.path:
        return ""
    from finetune.data.source import source_files

    try:
        return "" if source_files(source) is not None else f"datasets/{source.path}"
    except UserError:  # of files that are not as they are to be
        return ""


def _rows_are_here(source: SourceConfig) -> bool:
    """Whether a row of it can be read without the hub, just as training reads it."""
    from finetune.data.read import read

    try:
        return next(read(replace(source, limit=1)), None) is not None
    except UserError:
        return False


def _hub_check(answer: Answer, needed: list[str]) -> Check:
    names = ", ".join(needed)
    if not answer.trouble:
        what = f"; asked of it: {names}" if needed else "; nothing has to be fetched"
        return Check("hub", PASS, f"{hub.endpoint()} answers{answer.through}{what}")
    if not needed:
        return Check("hub", PASS, f"{answer.trouble}; nothing has to be fetched")
    fix = (
        "Bring them here first, and name their folders: model.name_or_path=DIR, data.train='[{path: FILE}]'."
    )
    return Check("hub", FAIL, f"{answer.trouble}, and these are not here: {names}", fix)


def _access_check(name: str) -> Check:
    """Whether this login may read it; the hub says so without sending it."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    kind, _, repository = name.partition("/") if name.startswith("datasets/") else ("", "", name)
    check = f"{'data' if kind else 'model'} access"
    login = "logged in" if get_token() else "nobody is logged in"
    try:
        HfApi(endpoint=hub.endpoint()).auth_check(repository, repo_type="dataset" if kind else "model")
    except GatedRepoError:
        fix = f"Ask for access on {hub.endpoint()}/{name}, then: hf auth login."
        return Check(check, FAIL, f"{name} is gated, and this login may not read it ({login})", fix)
    except RepositoryNotFoundError:
        why = f"{name} is not on the hub, or private ({login})"
        return Check(check, FAIL, why, "Check the name; hf auth login.")
    except (HfHubHTTPError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        return Check(check, WARN, f"{name}: {why}", "Try again; training fetches it before anything starts.")
    return Check(check, PASS, f"{name} can be read ({login})")


def _clock_check(answer: Answer) -> list[Check]:
    """This clock against the hub's; nothing where the hub does not tell it."""
    if not answer.date:
        return []
    apart = time.time() - parsedate_to_datetime(answer.date).timestamp()
    told = f"{abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} the hub's"
    if abs(apart) > SKEW_SECONDS:
        fix = "sudo timedatectl set-ntp true; stores refuse requests that are signed with a wrong time"
        return [Check("clock by hub", WARN, told, fix)]
    return [Check("clock by hub", PASS, told)]
