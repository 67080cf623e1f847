"""A conversation as a chat template can have it: one system message at its beginning, and later ones where there is a place for them.

A later system message that a template has no place for becomes a reminder in the turn of the user or the tool beside it. What becomes
of a turn depends only on the turns between the same two answers, so a conversation that goes on keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qwengyre.gateway.protocol.fields import Json
from qwengyre.trajectory.match import Turn


class Settled(msgspec.Struct, frozen=True):
    turns: tuple[Turn, ...]
    sources: tuple[int, ...]
    """For each turn, the index of the last one that went into it."""


def settle(turns: Sequence[Turn], *, has_later_system: bool, is_beginning: bool = True) -> Settled:
    """Turns for a template; `has_later_system` says whether it takes system messages after the first turn.

    >>> said = settle([Turn("system", "a"), Turn("system", "b"), Turn("user", "c"), Turn("system", "d")], has_later_system=False)
    >>> [turn.text for turn in said.turns]
    ['a\\n\\nb', 'c\\n\\n<system-reminder>\\nd\\n</system-reminder>']
    """
    num_leading = next((at for at, turn in enumerate(turns) if turn.role != "system"), len(turns)) if is_beginning else 0
    out: list[Turn] = []
    sources: list[int] = []
    if num_leading:
        out.append(Turn(role="system", text="\n\n".join(turn.text for turn in turns[:num_leading])))
        sources.append(num_leading - 1)
    waiting: list[str] = []
    for at in range(num_leading, len(turns)):
        turn = turns[at]
        if turn.role == "system" and not has_later_system:
            if out and out[-1].role in ("user", "tool"):
                out[-1] = _reminded(out[-1], after=turn.text)
                sources[-1] = at
            else:
                waiting.append(turn.text)
            continue
        if waiting and turn.role in ("user", "tool"):
            turn, waiting = _reminded(turn, before=waiting), []
        elif waiting:
            out.append(_reminder(waiting))
            sources.append(at - 1)
            waiting = []
        out.append(turn)
        sources.append(at)
    if waiting:
        out.append(_reminder(waiting))
        sources.append(len(turns) - 1)
    return Settled(tuple(out), tuple(sources))


def with_tools(settled: Settled, tools: Sequence[Json]) -> Settled:
    """The system message tells of the tools: for a format that has calls, and a template that never says which (DeepSeek V3)."""
    lines = [msgspec.json.encode(tool).decode() for tool in tools]
    note = "\n".join(("# Tools", "", "You may call these functions:", "<tools>", *lines, "</tools>"))
    first, *others = settled.turns
    if first.role == "system":
        told = msgspec.structs.replace(first, text=f"{first.text}\n\n{note}" if first.text else note)
        return Settled((told, *others), settled.sources)
    return Settled((Turn(role="system", text=note), *settled.turns), (-1, *settled.sources))


def _reminder(texts: Sequence[str]) -> Turn:
    return Turn(role="user", text="\n\n".join(map(_marked, texts)))


def _reminded(turn: Turn, *, before: Sequence[str] = (), after: str | None = None) -> Turn:
    parts = [*map(_marked, before), *([turn.text] if turn.text else []), *([] if after is None else [_marked(after)])]
    return msgspec.structs.replace(turn, text="\n\n".join(parts))


def _marked(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"
