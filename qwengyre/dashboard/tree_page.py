"""One execution's tree as one HTML page that needs no other file: rows that fold, spans that open."""

from __future__ import annotations

from collections.abc import Sequence

from qwengyre.core.text import html_text
from qwengyre.dashboard.tree_rows import NodeRow, SpanRow, numbers, short

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e4e7ec; --back: #fff;
  --context: #98a2b3; --trained: #12805c; --masked: #c4610a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b3241; --back: #141821;
  --context: #5d6778; --trained: #3ecf9a; --masked: #f29d49; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } p { color: var(--soft); margin: .3rem 0 1rem; }
.node { border-top: 1px solid var(--line); padding: .35rem 0; }
.head { display: flex; gap: .7rem; align-items: center; }
.head button { border: 0; background: none; color: var(--soft); width: 1.4rem; cursor: pointer; font: inherit; }
.bar { display: inline-flex; width: 9rem; height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--line); flex: none; }
.context { background: var(--context); } .trained { background: var(--trained); } .masked { background: var(--masked); }
.what { color: var(--soft); } code { font: 12px ui-monospace, monospace; }
details { margin: .2rem 0 .2rem 2rem; } summary { cursor: pointer; color: var(--soft); }
table { border-collapse: collapse; font-size: 13px; } td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top; }
td.t { max-width: 46rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 12px ui-monospace, monospace; }
td.o::before { content: ""; display: inline-block; width: .6rem; height: .6rem; border-radius: 2px; margin-right: .4rem; background: var(--c); }
"""
_SCRIPT = """
const rows = [...document.querySelectorAll(".node")];
function show() {
  let hidden = Infinity;
  for (const row of rows) {
    const level = +row.dataset.level;
    if (level <= hidden) hidden = Infinity;
    row.hidden = level > hidden;
    if (!row.hidden && row.dataset.folded) hidden = level;
  }
}
document.addEventListener("click", event => {
  const button = event.target.closest("button"); if (!button) return;
  const row = button.closest(".node");
  row.dataset.folded = row.dataset.folded ? "" : "1";
  button.textContent = row.dataset.folded ? "\\u25b8" : "\\u25be";
  show();
});
"""


def tree_page(title: str, facts: str, rows: Sequence[NodeRow]) -> str:
    """The whole page. `facts` is one line on the execution: reward, end, calls, tokens."""
    longest = max((row.num_tokens for row in rows), default=1)
    body = "".join(_node(row, longest) for row in rows)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html_text(title)}</title><style>{_STYLE}</style>\n'
        f"<h1>{html_text(title)}</h1><p>{html_text(facts)}</p>\n"
        '<p><span style="color:var(--context)">&#9632;</span> context &nbsp; <span style="color:var(--trained)">&#9632;</span> trained '
        '&nbsp; <span style="color:var(--masked)">&#9632;</span> masked: sampled, but of a side call, at T = 0, or never received</p>\n'
        f"{body}\n<script>{_SCRIPT}</script></html>\n"
    )


def _node(row: NodeRow, longest: int) -> str:
    fold = "<button title='fold'>&#9662;</button>" if row.num_children else "<button disabled>&middot;</button>"
    parts = (("context", row.num_context), ("trained", row.num_trained), ("masked", row.num_masked))
    bar = "".join(f'<i class="{name}" style="width:{100 * count / longest:.2f}%"></i>' for name, count in parts if count)
    calls = (
        f"{short(row.calls[0])} to {short(row.calls[-1])} ({len(row.calls)} calls)"
        if len(row.calls) > 2
        else ", ".join(map(short, row.calls))
    )
    version = f" &middot; version {numbers(row.versions)}" if row.versions else ""
    counts = " &middot; ".join(f"{count:,} {name}" for name, count in parts if count)
    return (
        f'<div class="node" data-level="{row.level}" style="margin-left:{min(row.level, 24) * 1.4:.1f}rem"><div class="head">{fold}'
        f'<span class="bar">{bar}</span><b>{html_text(", ".join(role.value for role in row.roles))}</b>'
        f'<span class="what">{counts}{version} &middot; {html_text(calls)} &middot; {html_text(row.cause)} &middot; <code>{row.key}</code></span></div>'
        f"<details><summary>{len(row.spans)} span{'s' * (len(row.spans) > 1)}</summary>{_spans(row.spans)}</details></div>\n"
    )


def _spans(spans: Sequence[SpanRow]) -> str:
    head = "<tr><th>tokens</th><th>at</th><th>origin</th><th>call</th><th>role</th><th>version</th><th>server</th><th>mean log-prob</th><th>end</th><th></th></tr>"
    return f"<table>{head}{''.join(map(_span, spans))}</table>"


def _span(span: SpanRow) -> str:
    logprob = f"{span.mean_logprob:.3f}" if span.mean_logprob is not None else ""
    plain = (short(span.call), span.role.value, numbers(span.versions), ", ".join(span.servers), logprob, span.end)
    cells = "".join(f"<td>{html_text(text)}</td>" for text in plain)
    return (
        f'<tr><td>{span.num_tokens:,}</td><td>{span.start:,}</td><td class="o" style="--c:var(--{span.origin})">{span.origin}</td>'
        f'{cells}<td class="t">{html_text(span.text)}</td></tr>'
    )
