"""Can what the run needs from the hub be had, and is the clock right?"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from finetune import hub
from finetune.config.schema import RunConfig
from finetune.doctor.check import FAIL, PASS, WARN, Check

SKEW_SECONDS = 60.0
"""Signed requests (S3) are refused from 15 minutes, certificates about as late; this is long before."""
PATIENCE_SECONDS = 5.0


def network_checks(config: RunConfig) -> list[Check]:
    """The hub where the run needs it, and the clock by the hub's."""
    needed = _from_the_hub(config)
    return [_hub_check(needed), *(_access_check(name) for name in needed if hub.reachable()), *_clock_check()]


def _from_the_hub(config: RunConfig) -> list[str]:
    """What the run would fetch: a model that is not here, and sets of rows."""
    model = config.model.name_or_path
    here = Path(model).expanduser().exists() or hub.cached(model, config.model.revision)
    rows = [source.path for source in (*config.data.train, *config.data.eval)]
    away = [path for path in rows if not Path(path).expanduser().exists() and hub.ID.fullmatch(path)]
    models = [model] if not here and hub.ID.fullmatch(model) else []
    return [*models, *(f"datasets/{path}" for path in dict.fromkeys(away))]


def _hub_check(needed: list[str]) -> Check:
    proxies = urllib.request.getproxies()
    through = f" through the proxy {urlsplit(proxies['https']).hostname}" if "https" in proxies else ""
    names = ", ".join(needed)
    if hub.reachable():
        what = f"; to be fetched: {names}" if needed else "; nothing has to be fetched"
        return Check("hub", PASS, f"{hub.endpoint()} answers{through}{what}")
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
    why = "HF_HUB_OFFLINE is set" if offline else f"{hub.endpoint()} cannot be reached{through}"
    if not needed:
        return Check("hub", PASS, f"{why}; nothing has to be fetched")
    fix = (
        "Bring them here first, and name their folders: model.name_or_path=DIR, data.train='[{path: FILE}]'."
    )
    return Check("hub", FAIL, f"{why}, and these are not here: {names}", fix)


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
        return Check(
            "access",
            FAIL,
            f"{name} is not on the hub, or private ({login})",
            "Check the name; hf auth login.",
        )
    except (HfHubHTTPError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        return Check(
            "access", WARN, f"{name}: {why}", "Try again; training fetches it before anything starts."
        )
    return Check(check, PASS, f"{name} can be read ({login})")


def _clock_check() -> list[Check]:
    """This clock against the hub's; nothing where the hub cannot be asked."""
    if not hub.reachable():
        return []
    try:
        with urllib.request.urlopen(hub.endpoint(), timeout=PATIENCE_SECONDS) as answer:
            stated = answer.headers["Date"]
    except urllib.error.HTTPError as error:  # an answer all the same, with a date
        stated = error.headers["Date"]
    except OSError:
        return []
    if not stated:
        return []
    apart = time.time() - parsedate_to_datetime(stated).timestamp()
    told = f"{abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} the hub's"
    if abs(apart) > SKEW_SECONDS:
        fix = "sudo timedatectl set-ntp true; stores refuse requests that are signed with a wrong time"
        return [Check("time", WARN, told, fix)]
    return [Check("time", PASS, told)]
