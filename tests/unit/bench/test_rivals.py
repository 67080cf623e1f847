"""The picture and the table of docs/rivals.md are made of the data beside them, and the data of the simulator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from qwengyre.bench.rivals import Field, draw, field, table
from qwengyre.bench.tuning import foreseen
from qwengyre.sim.results import Drawn, Inline
from qwengyre.sim.workload import builtin_workloads

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def measured() -> list[Field]:
    return msgspec.json.decode((DOCS / "rivals.json").read_bytes(), type=list[Field])


def test_the_picture_is_of_the_data(measured: list[Field]):
    assert draw(measured) == (DOCS / "rivals.svg").read_text()


def test_the_tables_are_of_the_data(measured: list[Field]):
    text = (DOCS / "rivals.md").read_text()
    assert [found.workload for found in measured] == list(builtin_workloads())
    for found in measured:
        assert table(found).strip() in text


def test_the_front_is_what_none_beats_in_time_and_staleness(measured: list[Field]):
    for found in measured:
        beaten = [
            one for one in found.placed
            if any(
                other.hours <= one.hours and other.staleness_max <= one.staleness_max
                and (other.hours, other.staleness_max) != (one.hours, one.staleness_max)
                for other in found.placed
            )
        ]  # fmt: skip
        assert [one for one in found.front if one in beaten] == []
        assert len(found.front) + len(beaten) == len(found.placed)


def test_every_system_runs_under_the_cap_of_the_paper_s_setting():
    small = msgspec.structs.replace(
        builtin_workloads()["tb_v1"], steps=6, groups_per_step=4, executions_per_group=4, nodes=12, train_node_hours_per_step=1.2
    )
    found = field("small", Drawn(foreseen(small)), [0], Inline())
    uncapped = ("one step off (verl)", "toggle, twice B active")
    assert all(one.staleness_max <= found.max_staleness for one in found.placed if one.system not in uncapped)
    assert found.placed[-1].hours <= found.placed[-2].hours, "the plan may take the paper's setting, too"
