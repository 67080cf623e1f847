"""Calls of forks: sub-agents that take over another agent's context, system prompt included, and differ by their last user message.

Nothing in its system prompt tells a fork from the agent it came of. Two things do: a rule of its harness that knows its first message
(`HarnessRules.fork`), and its final text, which comes back to the other agent as the result of the tool call that started it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwengyre.core.ids import CallId
from qwengyre.trajectory.calls import RecordedCall
from qwengyre.trajectory.records import BranchCause

Calls = Mapping[CallId, RecordedCall]


def returned_forks(calls: Calls) -> set[CallId]:
    """The first call of every context whose final text came back to another one as a tool result.

    `calls` are in the order in which they reached the gateway. A fork began later than the agent that it reports to: a context
    from before a compaction, whose text the agent reads again, is not a fork of the context after it.
    """
    order = {call: index for index, call in enumerate(calls)}
    firsts: set[CallId] = set()
    for caller in calls.values():
        if not caller.started.hints.returns:
            continue
        held = [call.id for call in _held(calls, caller)]
        for returned in (calls[call] for call in caller.started.hints.returns if call in calls):
            first = [call.id for call in _held(calls, returned) if call.id not in held][-1:]
            firsts.update(call for call in first if order[held[-1]] < order[call] < order[caller.id])
    return firsts


def fork_calls(calls: Calls, firsts: set[CallId], kinds: Mapping[CallId, str]) -> set[CallId]:
    """Every call of the forks that begin with one of `firsts`: retries, what goes on from them, and what goes on from their summaries."""
    forked = {_first_asked(calls, calls[call]).id for call in firsts}
    for call in calls.values():
        parent, quoted = _parent(calls, call), call.started.hints.quotes
        goes_on = parent is not None and parent.id in forked
        is_of_summary = quoted is not None and quoted in forked and kinds.get(quoted) == "summary"
        if goes_on or _first_asked(calls, call).id in forked or is_of_summary:
            forked.add(call.id)
    return forked


def _find(calls: Calls, call: CallId | None) -> RecordedCall | None:
    return None if call is None else calls.get(call)


def _held(calls: Calls, call: RecordedCall) -> Iterator[RecordedCall]:
    """The call, and every call whose answer stands in its context, the latest first."""
    at: RecordedCall | None = call
    while at is not None:
        yield at
        at = _parent(calls, at)


def _first_asked(calls: Calls, call: RecordedCall) -> RecordedCall:
    """The call that asked this one's context first."""
    while call.started.cause is BranchCause.RETRY and (base := _find(calls, call.base)) is not None:
        call = base
    return call


def _parent(calls: Calls, call: RecordedCall) -> RecordedCall | None:
    """The call whose answer is the last one in this call's context. One that shares only a part of a prompt has that prompt's."""
    call = _first_asked(calls, call)
    base, shared = _find(calls, call.base), call.base_tokens
    if call.started.cause in (BranchCause.EXTENDS, BranchCause.RERENDERED):
        return base
    while base is not None and shared <= base.num_prompt:
        shared = min(shared, base.base_tokens)
        base = _find(calls, base.base)
    return base
