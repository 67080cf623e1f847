"""State machines are an enum, one table and `advance`; what the table lacks raises."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from qwengyre.core.errors import IllegalTransition

State = TypeVar("State", bound=Enum)


def advance(table: Mapping[tuple[State, type], State], who: str, state: State, event: object) -> State:
    """Return the state that `table` gives for `event` (looked up by its type).

    Raises IllegalTransition, naming `who`, when the table has no such row.
    """
    try:
        return table[state, type(event)]
    except KeyError:
        raise IllegalTransition(who, state, event) from None


def mermaid(table: Mapping[tuple[State, type], State]) -> str:
    """Print a table as a Mermaid state diagram, so that the docs cannot disagree with the code."""
    rows = [f"    {a.name.lower()} --> {b.name.lower()}: {event.__name__}" for (a, event), b in table.items()]
    return "\n".join(["stateDiagram-v2", *rows])
