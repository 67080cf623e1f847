"""A launcher: starts the process of a cell somewhere, says when it has ended, ends it. Decides nothing.

Control API and data plane are the cells' own, whatever launched them. Every launcher passes `tests/contract/launchers.py`.
"""

from __future__ import annotations

from typing import Protocol

from qwengyre.cell.cell import CellAddress, CellSpec


class CellLife(Protocol):
    """One life of one cell's process."""

    address: CellAddress

    async def wait_end(self) -> str:
        """Until the process is gone, or out of reach for good; the reason in words."""
        ...

    def kill(self) -> None:
        """End it now, stalled or not, without waiting. Harmless for one that is gone."""
        ...

    async def stop(self) -> None:
        """Ask it to end, insist after a while; it is gone on return."""
        ...


class CellLauncher(Protocol):
    """Cells die with their launcher's process, however that ends."""

    async def launch(self, name: str, spec: CellSpec) -> CellLife:
        """Start a process for `spec`, called `name` in logs, and wait until it serves.

        Fills in `spec.host` and `spec.ready_file`. Raises ProcessFailed; NoRoom when there is no place for it now.
        """
        ...

    async def close(self) -> None:
        """Give back what is the launcher's own. Lives are stopped by their owner first."""
        ...
