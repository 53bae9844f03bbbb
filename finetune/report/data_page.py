"""Prepared data as one HTML page: what was said, lengths as bars, samples with the learnt text coloured."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
body { color: #222 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem; border-radius: 4px }
pre { background: #f6f6f4 }
mark { background: #bfe8c5; color: inherit }
td { padding: 0 .6rem 0 0; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.bar { width: 100%; text-align: left } td.bar div { background: #7a9cc6; height: .9em }
@media (prefers-color-scheme: dark) {
  body { background: #1c1c1e; color: #ddd } pre { background: #2a2a2c } mark { background: #24562d }
}
"""


def data_page(splits: dict[str, dict[str, Any] | None], lines: list[str]) -> str:
    """Render the page; it needs nothing beside itself."""
    body = [f"<pre>{escape(chr(10).join(lines))}</pre>"]
    for name, said in splits.items():
        if said is not None:
            body += [f"<h2>{escape(name)}</h2>", split_content(said)]
    head = f'<meta charset="utf-8"><title>Prepared data</title><style>{STYLE}</style>'
    legend = "<p>Learnt text is <mark>marked</mark>; the rest is only read.</p>"
    content = "\n".join(["<h1>Prepared data</h1>", legend, *body])
    return f"<!doctype html><html lang=en><head>{head}</head><body>{content}</body></html>\n"


def split_content(said: dict[str, Any]) -> str:
    """Lengths as bars and the first samples of one split."""
    return "\n".join([_lengths(said["lengths"]), *map(_sample, said["samples"])])


def _lengths(bars: list[dict[str, int]]) -> str:
    most = max(bar["rows"] for bar in bars)
    rows = "".join(
        f"<tr><td>{bar['from']:,} to {bar['below'] - 1:,}</td><td>{bar['rows']:,}</td>"
        f'<td class=bar><div style="width:{100 * bar["rows"] / most:.1f}%"></div></td></tr>'
        for bar in bars
    )
    return f"<p>Rows by length in tokens</p><table>{rows}</table>"


def _sample(sample: dict[str, Any]) -> str:
    text = "".join(
        f"<mark>{escape(piece['text'])}</mark>" if piece["supervised"] else escape(piece["text"])
        for piece in sample["pieces"]
    )
    return f"<p>{escape(sample['place'])}</p><pre>{text}</pre>"
