"""Which known name a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is close."""
    candidates = list(known)
    folded = {c.lower(): c for c in reversed(candidates)}
    match = get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[match[0]] if match else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key most like `key`: a sibling first, then the same or a similar name elsewhere."""
    keys = list(known)
    group, _, last = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == group}
    everywhere = {k.rpartition(".")[2]: k for k in reversed(keys)}
    for names in (siblings, everywhere):
        name = nearest(last, names)
        if name is not None:
            return names[name]
    return nearest(key, keys)
