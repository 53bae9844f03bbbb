"""Is the Hugging Face hub within reach right now?

Its clients retry for minutes before they say no, so one look at the door comes first.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from functools import cache
from urllib.parse import urlsplit

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
