"""The identifiers that cross folder boundaries. Each is one word of the glossary (docs/architecture.md)."""

from __future__ import annotations

from typing import Final, NewType

GroupId = NewType("GroupId", int)
"""A rollout group, numbered from 0 in the order of dispatch. Evaluation groups share the numbering."""
ExecutionId = NewType("ExecutionId", str)
"""One execution: `e000012-3` is execution 3 of group 12. An execution dispatched again keeps its id with a new attempt."""
CallId = NewType("CallId", str)
"""One model call, unique in the run: `<execution>/c17`, or `<execution>/a1c17` in a later attempt."""
CellId = NewType("CellId", int)
"""A cell, numbered by its place in the fixed order of leaving: 0 is the core."""
ServerId = NewType("ServerId", str)
"""Anything that serves calls: `cell-3` or `standalone-0`."""
CORE: Final = CellId(0)
"""The cell that has the optimizer's state; it leaves rollout first."""
MicroStepId = NewType("MicroStepId", str)
LocalPath = NewType("LocalPath", str)
"""A file or folder of this machine in a run file, "" for none. Relative ones are made absolute when the run file is loaded."""

ModelPlace = NewType("ModelPlace", str)
"""A model's folder in a run file, as a LocalPath, or its name on the Hugging Face hub, "" for none."""
Url = NewType("Url", str)
"""An address in a run file: http:// or https://, "" for none."""
ModelName = NewType("ModelName", str)
"""What a server calls a model."""


def execution_id(group: int, index: int) -> ExecutionId:
    """
    >>> execution_id(12, 3)
    'e000012-3'
    """
    return ExecutionId(f"e{group:06d}-{index}")


def group_of(execution: ExecutionId) -> GroupId:
    """Raises ValueError for what `execution_id` never returns.

    >>> group_of(execution_id(12, 3))
    12
    """
    return GroupId(_parts(execution)[0])


def index_of(execution: ExecutionId) -> int:
    """Its place in the group. Raises ValueError for what `execution_id` never returns.

    >>> index_of(execution_id(12, 3))
    3
    """
    return _parts(execution)[1]


def call_id(execution: ExecutionId, attempt: int, number: int) -> CallId:
    """The `number`-th call of an attempt.

    >>> call_id(execution_id(12, 3), 0, 17), call_id(execution_id(12, 3), 1, 17)
    ('e000012-3/c17', 'e000012-3/a1c17')
    """
    return CallId(f"{execution}/c{number}" if attempt == 0 else f"{execution}/a{attempt}c{number}")


def call_number(call: CallId) -> int:
    """
    >>> call_number(call_id(execution_id(12, 3), 1, 17))
    17
    """
    return int(call.rpartition("c")[2])


def _parts(execution: ExecutionId) -> tuple[int, int]:
    group, _, index = execution.removeprefix("e").partition("-")
    if not (group.isdecimal() and index.isdecimal()) or execution_id(int(group), int(index)) != execution:
        raise ValueError(f"{execution!r} is not the id of an execution, such as {execution_id(12, 3)!r}")
    return int(group), int(index)


def cell_server(cell: int) -> ServerId:
    return ServerId(f"cell-{cell}")


def standalone_server(index: int) -> ServerId:
    return ServerId(f"standalone-{index}")


def is_standalone(server: ServerId) -> bool:
    """Whether a server never trains."""
    return server.startswith("standalone-")


def numbered_server(number: int, num_cells: int) -> ServerId:
    """Processes that serve are numbered on: the cells first, then the standalone engines.

    >>> numbered_server(2, num_cells=3), numbered_server(3, num_cells=3)
    ('cell-2', 'standalone-0')
    """
    return cell_server(number) if number < num_cells else standalone_server(number - num_cells)
