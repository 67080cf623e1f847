"""The frame of every page: style, light and dark, and the few blocks that reports are made of. No script, no other file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from qwengyre.core.text import html_text
from qwengyre.dashboard import svg

PICTURE_STYLE: Final = """
  :root, svg { --page:#fcfcfb; --card:#ffffff; --ink:#0b0b0b; --ink-2:#52514e; --ink-3:#7b7a74; --line:#e6e5e0; --axis:#b9b8b1;
    --blue:#2a78d6; --orange:#e2571e; --green:#0e9a68; --amber:#e39a00; --red:#d93c3b; --violet:#5b4bc4; --magenta:#cf4f86; }
  @media (prefers-color-scheme: dark) { :root, svg { --page:#141413; --card:#1b1b19; --ink:#ffffff; --ink-2:#c3c2b7; --ink-3:#93928a;
    --line:#2e2e2b; --axis:#55544f; --blue:#3f8ef0; --orange:#e8703d; --green:#22a97a; --amber:#cf9112; --red:#e66767; --violet:#9085e9; --magenta:#d9638f; } }
  svg { display:block; width:100%; height:auto; font:12px/1.3 system-ui, sans-serif; }
  svg text { fill:var(--ink-2); } svg .tick { fill:var(--ink-3); font-size:11.5px; font-variant-numeric:tabular-nums; }
  svg .label { fill:var(--ink-2); font-size:12.5px; } svg .small-title { fill:var(--ink-2); font-size:13px; }
  svg .small-value { fill:var(--ink); font-size:13px; font-weight:600; } svg .on-fill { fill:#fff; font-weight:600; }
  svg .grid { stroke:var(--line); } svg .axis { stroke:var(--axis); } svg .mark { stroke:var(--line); stroke-dasharray:2 3; }
  svg .line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round; } svg .line.thin { stroke-width:1.4; }
  svg .line.bold { stroke-width:2.8; } svg .faint { opacity:.4; } svg .dot { stroke:var(--card); stroke-width:1.2; } svg .area { opacity:.16; }
  svg .line.held-out, svg .line.series-0 { stroke:var(--blue); } svg .dot.held-out, svg .dot.series-0 { fill:var(--blue); }
  svg .line.greedy, svg .line.series-1 { stroke:var(--orange); } svg .dot.greedy, svg .dot.series-1 { fill:var(--orange); }
  svg .line.series-2 { stroke:var(--green); } svg .dot.series-2 { fill:var(--green); }
  svg .line.series-3 { stroke:var(--violet); } svg .dot.series-3 { fill:var(--violet); }
  svg .line.series-4 { stroke:var(--magenta); } svg .dot.series-4 { fill:var(--magenta); }
  svg .line.series-5 { stroke:var(--amber); } svg .dot.series-5 { fill:var(--amber); }
  svg .line.greedy { stroke-dasharray:6 4; } svg .line.muted { stroke:var(--axis); } svg .dot.muted { fill:var(--ink-3); }
  svg .line.water { stroke:var(--violet); } svg .area.water { fill:var(--violet); } svg .line.capacity { stroke:var(--ink-3); }
  svg .fill.rollout { fill:var(--blue); } svg .fill.training { fill:var(--green); } svg .fill.transit { fill:var(--amber); } svg .fill.lost { fill:var(--red); } svg .fill.plan { fill:var(--line); }
"""

PAGE_STYLE: Final = """
  * { box-sizing:border-box; } body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
  main { max-width:1060px; margin:0 auto; padding:32px 20px 64px; } h1 { font-size:26px; margin:0 0 2px; letter-spacing:-.01em; }
  h2 { font-size:17px; margin:0 0 2px; } p { margin:0 0 14px; color:var(--ink-2); max-width:78ch; } .sub { color:var(--ink-3); margin-bottom:22px; }
  section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:18px 20px; margin:0 0 18px; overflow-x:auto; }
  section > svg { min-width:640px; } .tiles { display:grid; grid-template-columns:repeat(auto-fit, minmax(150px, 1fr)); gap:12px; margin:0 0 18px; }
  .tile { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 16px; } .tile .name { color:var(--ink-3); font-size:13px; }
  .tile .value { font-size:24px; font-weight:650; letter-spacing:-.01em; } .tile .more { color:var(--ink-2); font-size:13px; }
  .grid3 { display:grid; grid-template-columns:repeat(auto-fill, minmax(270px, 1fr)); gap:10px 18px; } .grid3 svg { min-width:0; }
  table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:14px; } td, th { padding:5px 12px 5px 0; text-align:left; border-bottom:1px solid var(--line); }
  th { color:var(--ink-3); font-weight:500; } td.num, th.num { text-align:right; } .pair td { vertical-align:top; } .pair td:first-child { color:var(--ink-2); width:26%; } .hint { color:var(--ink-3); font-size:13px; } details summary { cursor:pointer; color:var(--ink-2); }
  footer { color:var(--ink-3); font-size:13px; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML document."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
    content = "\n".join(body)
    return f"<!doctype html>\n<html lang='en'><head>{head}<title>{html_text(title)}</title>\n<style>{PICTURE_STYLE}{PAGE_STYLE}</style></head>\n<body><main>\n{content}\n</main></body></html>\n"


def section(title: str, explanation: str, *content: str) -> str:
    """One card. `explanation` says how to read it."""
    text = f"<p>{html_text(explanation)}</p>" if explanation else ""
    return f"<section><h2>{html_text(title)}</h2>{text}{''.join(content)}</section>"


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Big numbers: (name, value, what to know about it)."""
    inner = "".join(
        f'<div class="tile"><div class="name">{html_text(name)}</div><div class="value">{html_text(value)}</div><div class="more">{html_text(more)}</div></div>'
        for name, value, more in entries
    )
    return f'<div class="tiles">{inner}</div>'


def pairs(rows: Sequence[tuple[str, str, str]]) -> str:
    """Name, value, and what is good."""
    body = "".join(
        f'<tr><td>{html_text(name)}</td><td>{html_text(value)}</td><td class="hint">{html_text(hint)}</td></tr>'
        for name, value, hint in rows
    )
    return f'<table class="pair">{body}</table>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 0) -> str:
    """Numbers in columns; the first `num_names` columns are text."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = ["" if index < num_names else ' class="num"' for index in range(len(cells))]
        return (
            "<tr>" + "".join(f"<{tag}{kind}>{html_text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        )

    return f"<table>{row('th', header)}{''.join(row('td', cells) for cells in rows)}</table>"


def standalone(figure: str) -> str:
    """An SVG figure as a file of its own, with its style inside."""
    opened = figure.index(">") + 1
    return (
        f"{figure[:opened]}<style>{PICTURE_STYLE}</style><rect width='100%' height='100%' fill='var(--card)'/>{figure[opened:]}\n"
    )


def stacked(figures: Sequence[str], title: str) -> str:
    """Several figures as one, each under the other."""
    parts, height, width = [], 0.0, 0.0
    for figure in figures:
        box = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"', figure)
        assert box is not None, "figures come from svg.figure"
        body = figure[figure.index(">") + 1 : figure.rindex("</svg>")]
        parts.append(f'<g transform="translate(0 {height:g})">{body}</g>')
        height, width = height + float(box[2]) + 12, max(width, float(box[1]))
    return svg.figure(width, height, parts, title)
