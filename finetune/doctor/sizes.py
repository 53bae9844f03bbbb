"""How is a size told? In GB of 10^9 bytes; what is exchanged in GiB, in which it is counted out."""

from __future__ import annotations

MIB, GIB, GB = 2**20, 2**30, 10**9


def gib_text(size_bytes: float) -> str:
    """`64 MiB`, `39.5 GiB`, `1 GiB`."""
    mib = round(size_bytes / MIB)
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:,.1f}".removesuffix(".0") + " GiB"


def gb_text(size_bytes: float) -> str:
    """`250.0 MB`, `16.4 GB`."""
    return f"{size_bytes / GB:,.1f} GB" if size_bytes >= GB else f"{size_bytes / 10**6:,.1f} MB"
