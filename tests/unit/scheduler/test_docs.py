"""The page of the scheduler says what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from qwengyre.core.state_machine import mermaid
from qwengyre.scheduler import commands
from qwengyre.scheduler.cells import CELL
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.policies import POLICIES
from qwengyre.scheduler.training import STEP
from qwengyre.scheduler.traits import TRAITS, PolicyName

PAGE = (Path(__file__).parents[3] / "docs" / "scheduler.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [CELL, STEP], ids=["cell", "step"])
def test_diagrams_are_printed_from_the_tables(table: dict):
    assert mermaid(table) in PAGE


def test_the_drivers_table_is_that_of_the_commands():
    rows = [line for line in commands.__doc__.splitlines() if line.startswith("|")]
    assert len(rows) > 15 and all(row in PAGE for row in rows)


def test_every_command_is_in_the_drivers_table():
    assert all(f"| {kind.__name__} |" in commands.__doc__ for kind in commands.AnyCommand.__args__)


def test_symbols_are_named_by_fields_that_exist():
    for field in (
        "num_cells",
        "slots_per_cell",
        "groups_per_step",
        "steps_per_burst",
        "dispatch_depth",
        "max_staleness",
        "two_way",
        "backlog",
    ):
        assert field in SchedulerConfig.__struct_fields__ and f"`{field}" in PAGE


def test_every_policy_has_its_traits_and_its_rules():
    assert POLICIES.keys() == TRAITS.keys() == set(get_args(PolicyName))
