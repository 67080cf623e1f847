"""Cumulative counters of the gateway, as the controller asks for them."""

from __future__ import annotations

import msgspec

from qwengyre.trajectory.records import CallFinished


class GatewayStats(msgspec.Struct):
    calls_started: int = 0
    calls_finished: int = 0
    calls_abandoned: int = 0
    calls_failed: int = 0
    calls_moved: int = 0
    """Times that a running call went on at another server."""
    calls_joined: int = 0
    """Retries that got the answer of a call that was running already or had been cut."""
    tokens_sampled: int = 0
    tokens_prompted: int = 0
    tokens_cached: int = 0
    tokens_moved: int = 0
    """Tokens whose KV was carried to another server."""
    tokens_recomputed_after_move: int = 0
    tokens_rendered: int = 0
    """Prompt tokens that were encoded: what was new in each call."""
    rerendered: int = 0
    """Contexts that the template could not extend."""
    held_s: float = 0.0
    client_errors: int = 0
    """Answers with status 4xx."""
    server_errors: int = 0
    """Answers with status 5xx to clients that were still there: none should ever see one."""
    closed_while_waiting: int = 0
    """Calls whose execution was closed under them, after a harness timeout mostly: nobody is left to read the answer."""
    disconnects: int = 0
    characters_mended: int = 0
    """Halves of surrogate pairs, and bytes that are not UTF-8, that were read as U+FFFD."""

    def count_finished(self, record: CallFinished) -> None:
        self.held_s += record.held_s
        if record.reason == "error":
            self.calls_failed += 1
        elif record.abandoned:
            self.calls_abandoned += 1
        else:
            self.calls_finished += 1


class SessionCounts(msgspec.Struct):
    """The same of one execution."""

    calls: int = 0
    tokens: int = 0
    """Distinct: context and sampled."""
    tokens_sampled: int = 0
    num_moves: int = 0
    held_s: float = 0.0
