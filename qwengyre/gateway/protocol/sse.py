"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from qwengyre.gateway.protocol.deltas import Delta, ReasoningDelta, TextDelta, ToolArguments

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def data(payload: object) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def event(name: str, payload: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(payload) + b"\n\n"


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one kind: what arrived together leaves in one event."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(text=last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(text=last.text + delta.text)
        elif isinstance(delta, ToolArguments) and isinstance(last, ToolArguments) and last.index == delta.index:
            out[-1] = ToolArguments(index=delta.index, text=last.text + delta.text)
        else:
            out.append(delta)
    return out
