"""What an execution is called, and what its name says."""

from __future__ import annotations

import pytest

from qwengyre.core.ids import execution_id, group_of, index_of


@pytest.mark.parametrize(("group", "index"), [(0, 0), (12, 3), (1234, 17), (999_999, 7), (1_000_000, 0)])
def test_an_execution_knows_its_group_and_its_place(group: int, index: int):
    execution = execution_id(group, index)
    assert (group_of(execution), index_of(execution)) == (group, index)


@pytest.mark.parametrize(
    "name", ["", "main", "e000012", "e000012-", "e-3", "000012-3", "e12-3", "e000012-03", "e000012-3/c1", "e٠٠٠٠١٢-3"]
)
def test_a_name_that_is_not_an_execution_is_refused(name: str):
    for read in (group_of, index_of):
        with pytest.raises(ValueError, match="not the id of an execution"):
            read(name)
