"""When to stop a run in which nothing works: the same mistake, execution after execution or start after start, is the user's to mend."""

from __future__ import annotations

from collections import deque
from typing import Final

from qwengyre.core.errors import ProcessGaveUp, SandboxError
from qwengyre.core.records import End, Outcome
from qwengyre.core.text import quoted

KEYS: Final = {
    End.NEVER_CALLED: "harness.command (sandbox.harbor)",
    End.SETUP_FAILED: "harness.isolation (sandbox.harbor)",
    End.EVALUATOR_FAILED: "the tasks' tests/test.sh",
}
"""Ends that say that something is set up wrongly, and where to look. A crash or a timeout of a harness is data, not a mistake."""


MAX_LOSSES: Final = 5  # what is broken fails at every start
LOSSES_WITHIN_S: Final = 300.0  # five starts of a minute each


class Losses:
    """When each process of ours was lost. One that is lost too often is broken, and starting it again mends nothing."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def see(self, name: str, now: float, last_words: str = "") -> None:
        """Raises ProcessGaveUp at the fifth loss within five minutes."""
        seen = self._seen.setdefault(name, deque(maxlen=MAX_LOSSES))
        seen.append(now)
        if len(seen) == MAX_LOSSES and now - seen[0] < LOSSES_WITHIN_S:
            last_words = last_words or f"see logs/{name}.log in the run folder"
            raise ProcessGaveUp(name, last_words, num_losses=MAX_LOSSES, within_s=LOSSES_WITHIN_S)


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
                f"The last one says:\n{quoted(outcome.detail)}"
            )
