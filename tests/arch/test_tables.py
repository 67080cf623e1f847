"""Every state machine is one table in which each state can be reached."""

from __future__ import annotations

import importlib
from enum import Enum

import pytest

from tests.arch.source import imported, modules

STATE_MACHINE = "qwengyre.core.state_machine"


def transition_tables() -> dict[str, dict]:
    """The tables of all modules that use `core.state_machine`, by full name."""
    found = {}
    for module in modules("qwengyre"):
        if not any(name.startswith(STATE_MACHINE) for _, name in imported(module)):
            continue
        name = ".".join(module.path.with_suffix("").parts)
        for attribute, value in vars(importlib.import_module(name)).items():
            if is_table(value):
                found[f"{name}.{attribute}"] = value
    return found


def is_table(value: object) -> bool:
    """A dict from (enum member, event type) to enum member."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(
            isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], Enum) and isinstance(key[1], type) for key in value
        )
        and all(isinstance(after, Enum) for after in value.values())
    )


TABLES = transition_tables()


def test_the_cell_is_a_table():
    assert any(name.startswith("qwengyre.scheduler") for name in TABLES)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_state_can_be_reached_from_the_first(name: str):
    table = TABLES[name]
    states = type(next(iter(table))[0])
    reached, waiting = set(), [next(iter(states))]
    while waiting:
        state = waiting.pop()
        if state not in reached:
            reached.add(state)
            waiting += [after for (before, _), after in table.items() if before is state]
    assert set(states) - reached == set()
