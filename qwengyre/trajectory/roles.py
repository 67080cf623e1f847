"""The role of every call: by the rules of its harness where they tell, else by structure.

A role has two parts: whose call it is (main agent or sub-agent) and what for (work, summary or side). Structure reads the second from
what became of the answer, and the first from the system prompt:

* an answer that reappears in the head of a fresh context was a summary;
* a fresh context under another system prompt that carries another agent's answers, and is no summary, is a side call (memory extraction);
* a fresh context without tools, under another system prompt, that nothing goes on from, is a side call (title, commit message);
* any other context under another system prompt than the main agent's belongs to a sub-agent;
* so does a context under the same one whose final text comes back to the main agent as a tool result (`trajectory.forks`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from qwengyre.core.ids import CallId
from qwengyre.core.records import Role
from qwengyre.trajectory.calls import RecordedCall
from qwengyre.trajectory.forks import fork_calls, returned_forks
from qwengyre.trajectory.harness_rules import BUILTIN, Condition, HarnessRules
from qwengyre.trajectory.records import RoleHints

Calls = Mapping[CallId, RecordedCall]


def assign_roles(calls: Calls, rules: Sequence[HarnessRules] = BUILTIN) -> dict[CallId, Role]:
    """Role of every started call; `calls` in the order in which they reached the gateway (`TrajectoryTree.calls`)."""
    told = detect_harness(calls, rules) or HarnessRules(name="unknown", detect=())
    extended = _extended(calls)
    kinds = _told_kinds(calls, told, extended)
    main_system = _main_system(calls, kinds)
    for call in calls.values():
        if call.id not in kinds:
            kinds[call.id] = "side" if _is_side(call, calls, kinds, main_system, extended) else "work"
    firsts = {call.id for call in calls.values() if _any(told.fork, call.started.hints)}
    if told.sub_agent:
        is_sub = _told_sub_agents(calls, told)
    else:
        is_sub = _sub_agents(calls, kinds, main_system)
        firsts |= returned_forks(calls)
    is_sub |= fork_calls(calls, firsts, kinds)
    return {call: _role(kinds[call], call in is_sub) for call in calls}


def detect_harness(calls: Calls, rules: Sequence[HarnessRules] = BUILTIN) -> HarnessRules | None:
    """The first harness of `rules` that any call betrays."""
    return next((rule for rule in rules if any(_any(rule.detect, call.started.hints) for call in calls.values())), None)


def _find(calls: Calls, call: CallId | None) -> RecordedCall | None:
    return None if call is None else calls.get(call)


def _role(kind: str, is_sub: bool) -> Role:
    if kind == "side":
        return Role.SIDE
    if kind == "summary":
        return Role.SUB_AGENT_SUMMARY if is_sub else Role.MAIN_SUMMARY
    return Role.SUB_AGENT if is_sub else Role.MAIN


def _any(conditions: Sequence[Condition], hints: RoleHints) -> bool:
    return any(_holds(condition, hints) for condition in conditions)


def _holds(condition: Condition, hints: RoleHints) -> bool:
    if condition.is_empty:
        return False
    if condition.header:
        value = hints.headers.get(condition.header)
        if value is None or not re.search(condition.value, value):
            return False
    if condition.marker and condition.marker not in hints.markers:
        return False
    return condition.has_tools is None or condition.has_tools == (hints.num_tools > 0)


def _reused_as_summary(calls: Calls, kinds: Mapping[CallId, str], extended: set[CallId]) -> set[CallId]:
    """Calls whose answer stands in the head of a fresh context, as text or as its first assistant message.

    Only where an agent goes on there that was there before (a commit message or the next summary is asked for with answers quoted,
    too), and not answers that were simply gone on from.
    """
    reused: set[CallId] = set()
    prompts: set[str] = set()
    for call in (call for call in calls.values() if call.id not in kinds):
        hints = call.started.hints
        if hints.system_digest in prompts:
            source = _find(calls, hints.replays)
            if hints.quotes is not None and hints.quotes in calls:
                reused.add(hints.quotes)
            if source is not None and source.started.hints.num_tools == 0 and hints.num_tools > 0:
                reused.add(source.id)
        prompts.add(hints.system_digest)
    return reused - extended


def _told_kinds(calls: Calls, told: HarnessRules, extended: set[CallId]) -> dict[CallId, str]:
    kinds: dict[CallId, str] = {}
    for call in calls.values():
        if _any(told.side, call.started.hints):
            kinds[call.id] = "side"
        elif _any(told.summary, call.started.hints):
            kinds[call.id] = "summary"
    reused = _reused_as_summary(calls, kinds, extended)
    return dict.fromkeys(reused, "summary") | kinds


def _main_system(calls: Calls, kinds: Mapping[CallId, str]) -> str | None:
    """System prompt of the main agent: that of the first call that may be work, one with tools if there is any."""
    prompts = [call.started.hints for call in calls.values() if call.id not in kinds]
    first = next((hints for hints in prompts if hints.num_tools), next(iter(prompts), None))
    return first.system_digest if first else None


def _extended(calls: Calls) -> set[CallId]:
    """Calls whose answer another call's context goes on from; a retry that only takes up where a cut answer broke off does not."""
    extended: set[CallId] = set()
    for call in calls.values():
        base = _find(calls, call.base)
        if base is not None and call.num_context and call.base_tokens > base.num_prompt:
            extended.add(base.id)
    return extended


def _is_side(
    call: RecordedCall, calls: Calls, kinds: Mapping[CallId, str], main_system: str | None, extended: set[CallId]
) -> bool:
    hints, base = call.started.hints, _find(calls, call.base)
    if hints.system_digest == main_system:
        return False
    if base is not None and base.started.hints.system_digest == hints.system_digest:
        return kinds.get(base.id) == "side"
    source = _find(calls, hints.replays)
    if source is not None and source.started.hints.system_digest != hints.system_digest:
        return True
    return hints.num_tools == 0 and call.id not in extended


def _told_sub_agents(calls: Calls, told: HarnessRules) -> set[CallId]:
    """Calls that a rule calls a sub-agent's, and all others that bear the same agent name."""

    def agent(call: RecordedCall) -> str | None:
        return call.started.hints.headers.get(told.agent_header)

    by_rule = {call.id for call in calls.values() if _any(told.sub_agent, call.started.hints)}
    names = {agent(calls[call]) for call in by_rule} - {None}
    return by_rule | {call.id for call in calls.values() if agent(call) in names}


def _sub_agents(calls: Calls, kinds: Mapping[CallId, str], main_system: str | None) -> set[CallId]:
    """Calls under another system prompt than the main agent's. A summary belongs to the agent that reads it or whose work it retells."""
    readers = {call.started.hints.quotes: call for call in reversed([*calls.values()])}
    sub_prompts = {call.started.hints.system_digest for call in calls.values() if kinds[call.id] == "work"} - {main_system}

    def prompt(call: RecordedCall) -> str:
        owner = call
        if kinds[call.id] == "summary":
            owner = readers.get(call.id) or _find(calls, call.started.hints.replays) or call
        return owner.started.hints.system_digest

    return {call.id for call in calls.values() if prompt(call) in sub_prompts}
