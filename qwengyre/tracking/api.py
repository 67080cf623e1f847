"""What a tracker is told, and what it has to be. The same names and steps go to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

Cell = str | int | float | None


class RunToTrack(msgspec.Struct, frozen=True):
    """What a tracker opens a run with."""

    name: str
    """Name of the run folder."""
    project: str
    folder: str
    """Of the tracker's own files, inside of the run folder."""
    config: dict[str, str | int | float | bool | None]
    """The run file as resolved, by `table.key`; no values of `harness.env`."""
    uri: str = ""
    """Of MLflow's store."""


class Point(msgspec.Struct, frozen=True):
    """Numbers of one moment."""

    step: int
    """Optimizer steps, for what has a step; else seconds of the run."""
    has_step: bool
    values: dict[str, float]


class SentTable(msgspec.Struct, frozen=True):
    """Rows of one step."""

    name: str
    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Tracker(Protocol):
    """One tracker, in a process of its own. May raise anything and take any time: the run does not wait for it.

    What raised is sent again later, so that a point may come twice; it is the same point.
    """

    def open(self, run: RunToTrack, run_id: str) -> str:
        """Begin a run, or go on with the one of this id ("" for none). The id to go on with."""
        ...

    def points(self, points: Sequence[Point]) -> None: ...

    def table(self, table: SentTable) -> None: ...

    def summary(self, values: Mapping[str, Cell]) -> None:
        """In place of the summary before."""
        ...

    def checkpoint(self, step: int, folder: Path) -> None: ...

    def close(self, *, is_finished: bool) -> None:
        """The run is over, or stopped; a stopped one may be opened again."""
        ...
