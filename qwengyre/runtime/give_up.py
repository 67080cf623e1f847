"""When to stop a run in which nothing works: the same mistake, execution after execution, is the user's to mend."""

from __future__ import annotations

from typing import Final

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End, Outcome

KEYS: Final = {
    End.NEVER_CALLED: "harness.command",
    End.SETUP_FAILED: "harness.isolation",
    End.EVALUATOR_FAILED: "the tasks' tests/test.sh",
}
"""Ends that say that something is set up wrongly, and where to look. A crash or a timeout of a harness is data, not a mistake."""


class Patience:
    """Counts executions in a row that could not be used; any other one starts the count anew. `limit` 0 never gives up."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def see(self, outcome: Outcome) -> None:
        """Raises SandboxError with the story of the last one when `limit` have failed in a row."""
        if outcome.end not in KEYS:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._limit and self._in_a_row >= self._limit:
            raise SandboxError(
                f"the last {self._in_a_row} executions could not be used ({outcome.end.value}): look at {KEYS[outcome.end]}. "
                f"The last one says:\n{outcome.detail}"
            )
