"""What a request says about its role. The rules themselves are data in `trajectory.harness_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qwengyre.core.ids import CallId
from qwengyre.gateway.protocol.request import ModelRequest
from qwengyre.trajectory.harness_rules import BUILTIN, RequestTexts, captured_headers, find_markers
from qwengyre.trajectory.records import RoleHints

if TYPE_CHECKING:
    from qwengyre.gateway.session import Session

_HEADERS = captured_headers(BUILTIN)
MIN_QUOTE_CHARS = 40
"""Shorter answers ("done") stand in fresh contexts by accident."""
_PARTS = (("<summary>", "</summary>"), ("<state_snapshot>", "</state_snapshot>"))


def role_hints(request: ModelRequest, headers: Mapping[str, str], is_fresh: bool, session: Session) -> RoleHints:
    """`headers` are lower case. `is_fresh`: no recorded answer stands in this context."""
    texts = RequestTexts(system=request.system_text, first_user=request.first_user, last=request.last_block)
    return RoleHints(
        dialect=request.dialect,
        headers={name: headers[name] for name in _HEADERS if name in headers},
        system_digest=request.system_digest.hex(),
        tools_digest=request.tools.digest.hex(),
        num_tools=len(request.tools.specs),
        markers=find_markers(texts, BUILTIN),
        quotes=_quotes(request, session.answer_texts) if is_fresh else None,
        replays=_replays(request, session.answer_texts) if is_fresh else None,
    )


def _quotes(request: ModelRequest, answers: Mapping[CallId, str]) -> CallId | None:
    """The latest earlier call whose answer stands in a user or system message."""
    texts = [keyed.turn.text for keyed in request.turns if keyed.turn.role in ("user", "system")]
    for call in reversed(answers):
        essence = _essence(answers[call])
        if len(essence) >= MIN_QUOTE_CHARS and any(essence in text for text in texts):
            return call
    return None


def _replays(request: ModelRequest, answers: Mapping[CallId, str]) -> CallId | None:
    """The latest earlier call whose answer stands as an assistant message."""
    given = {keyed.turn.text.strip() for keyed in request.turns if keyed.is_answer}
    given.discard("")
    if not given:
        return None
    return next((call for call in reversed(answers) if answers[call].strip() in given), None)


def _essence(answer: str) -> str:
    """What harnesses keep of a summary: the tagged part where there is one."""
    for opening, closing in _PARTS:
        start, end = answer.find(opening), answer.rfind(closing)
        if 0 <= start < end:
            return answer[start + len(opening) : end].strip()
    return answer.strip()
