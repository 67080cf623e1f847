"""What a request says about its role. The rules themselves are data in `trajectory.harness_rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

import msgspec

from qwengyre.core.ids import CallId
from qwengyre.gateway.protocol.request import ModelRequest
from qwengyre.trajectory.harness_rules import BUILTIN, HarnessRules, RequestTexts, captured_headers, find_markers
from qwengyre.trajectory.match import Turn
from qwengyre.trajectory.records import RoleHints

MAX_FOUND = 4096  # a cache: started anew when it is full
MIN_QUOTE_CHARS = 40
"""Shorter answers ("done") stand in fresh contexts by accident."""
MAX_RETURN_CHARS, MAX_RETURNED = 1 << 16, 128
"""Of new tool results, and of the latest answers without a tool call that are looked for in them: bounds the time to some 10 ms."""
_PARTS = (("<summary>", "</summary>"), ("<state_snapshot>", "</state_snapshot>"))


class GivenAnswer(msgspec.Struct, frozen=True):
    """By what an earlier answer is known where it stands in a fresh context."""

    text: str
    essence: str
    """What harnesses keep of a summary: the tagged part where there is one."""
    tool_id: str | None
    """Of its first tool call."""

    @classmethod
    def of(cls, turn: Turn) -> GivenAnswer:
        text = turn.text.strip()
        return cls(text, _essence(text), turn.tool_uses[0].id if turn.tool_uses else None)


class HintReader:
    """Reads hints by the rules of all known harnesses."""

    def __init__(self, rules: Sequence[HarnessRules] = BUILTIN):
        self._rules, self._headers = rules, captured_headers(rules)
        self._found: dict[tuple[int, ...], tuple[str, ...]] = {}

    def read(
        self,
        request: ModelRequest,
        headers: Mapping[str, str],
        answers: dict[CallId, GivenAnswer],
        *,
        is_fresh: bool,
        num_known: int,
    ) -> RoleHints:
        """`headers` are lower case. `is_fresh`: no recorded answer stands in this context where it was given. `num_known`: its leading
        turns, up to the last such answer.
        """
        new_user = "\n".join(keyed.turn.text for keyed in request.turns[num_known:] if keyed.turn.role == "user")
        texts = RequestTexts(request.system_text, request.first_user, request.last_block, new_user)
        return RoleHints(
            dialect=request.dialect,
            headers={name: headers[name] for name in self._headers if name in headers},
            system_digest=request.system_digest.hex(),
            num_tools=len(request.tools.specs),
            markers=self._markers(texts),
            quotes=_quotes(request, answers) if is_fresh else None,
            replays=_replays(request, answers) if is_fresh else None,
            returns=_returns(request, answers),
        )

    def _markers(self, texts: RequestTexts) -> tuple[str, ...]:
        """Large prompts come again at every call: look once."""
        key = (hash(texts.system), hash(texts.first_user), hash(texts.last), hash(texts.new_user))
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            found = self._found[key] = find_markers(texts, self._rules)
        return found


def _quotes(request: ModelRequest, answers: dict[CallId, GivenAnswer]) -> CallId | None:
    """The latest earlier call whose answer stands in a user or system message."""
    texts = [keyed.turn.text for keyed in request.turns if keyed.turn.role in ("user", "system")]
    longest = max(map(len, texts), default=0)
    for call in reversed(answers):
        essence = answers[call].essence
        if MIN_QUOTE_CHARS <= len(essence) <= longest and any(essence in text for text in texts):
            return call
    return None


def _replays(request: ModelRequest, answers: dict[CallId, GivenAnswer]) -> CallId | None:
    """The latest earlier call whose answer stands as an assistant message: known by its tool calls, or by its text."""
    given = [keyed.turn for keyed in request.turns if keyed.is_answer]
    if not given:
        return None
    texts = {turn.text.strip() for turn in given if not turn.tool_uses} - {""}
    tool_ids = {use.id for turn in given for use in turn.tool_uses}
    for call in reversed(answers):
        answer = answers[call]
        if answer.tool_id in tool_ids or (answer.tool_id is None and answer.text in texts):
            return call
    return None


def _returns(request: ModelRequest, answers: dict[CallId, GivenAnswer]) -> tuple[CallId, ...]:
    """The earlier calls whose answer has no tool call and stands in a new tool result."""
    new = takewhile(lambda keyed: not keyed.is_answer, reversed(request.turns))
    results = [keyed.turn.text.strip() for keyed in new if keyed.turn.role == "tool"]
    if not results or sum(map(len, results)) > MAX_RETURN_CHARS:
        return ()
    final = islice((call for call in reversed(answers) if answers[call].tool_id is None), MAX_RETURNED)
    return tuple(call for call in final if any(_reports(result, answers[call].text) for result in results))


def _reports(result: str, answer: str) -> bool:
    return result == answer != "" or (len(answer) >= MIN_QUOTE_CHARS and answer in result)


def _essence(answer: str) -> str:
    for opening, closing in _PARTS:
        start, end = answer.find(opening), answer.rfind(closing)
        if 0 <= start < end:
            return answer[start + len(opening) : end].strip()
    return answer
