"""Canonical messages, and the deepest match of a request against what this execution was asked and answered before.

A context is a chain of turns. Each turn has a digest of its canonical form, and the chain key of a prefix is
`H(chain key of the shorter prefix, digest)`, started from the tools. Two requests share a prefix exactly where their
chain keys are equal, so a request is matched in one walk and nothing is compared twice.

What the policy answered is matched more loosely than what the harness wrote, because harnesses rewrite it:
reasoning may be missing, outer whitespace may be trimmed, and a tool call that we issued is known by its id alone, so
its name and raw arguments are restored from the recording. All of it only when the rest of the message is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from qwengyre.core.ids import CallId

TurnRole = Literal["system", "user", "assistant", "tool"]
DIGEST_BYTES = 16


class ToolUse(msgspec.Struct, frozen=True):
    """One tool call as it stands in a message. `arguments` is JSON text exactly as the policy wrote it when it did."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message in the form that all dialects share: what the template sees and nothing else."""

    role: TurnRole
    text: str = ""
    reasoning: str | None = None
    """None when the message has no reasoning at all."""
    tool_uses: tuple[ToolUse, ...] = ()
    tool_use_id: str = ""
    """In a tool turn: which tool call this is the result of."""
    name: str = ""
    """In a tool turn: the tool's name, when it is known."""


class KeyedTurn(msgspec.Struct, frozen=True):
    turn: Turn
    digest: bytes
    """Of the canonical form, without reasoning."""
    reasoning_digest: bytes | None
    """Of the trimmed reasoning; None without reasoning."""

    @property
    def is_answer(self) -> bool:
        return self.turn.role == "assistant"


def digest(*parts: bytes) -> bytes:
    """Digest of the parts with their lengths, so that no two lists of parts collide by concatenation."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(b"%d:" % len(part))
        state.update(part)
    return state.digest()


def canonical_json(text: str) -> bytes:
    """Sorted keys, no spaces, 10000.0 as 10000; the text itself where it is no JSON, or nested too deeply to be read.

    >>> canonical_json('{ "b": 10000.0, "a": "x" }')
    b'{"a":"x","b":10000}'
    """
    try:
        return msgspec.json.encode(_plain(msgspec.json.decode(text)), order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return text.strip().encode("utf-8", "surrogatepass")


def _plain(value: object) -> object:
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
    return value


def key_turn(turn: Turn, issued: Mapping[str, object]) -> KeyedTurn:
    """Digest a turn. `issued` holds the ids of the tool calls that this execution was given by us."""
    parts = [turn.role.encode(), _comparable_text(turn).encode("utf-8", "surrogatepass")]
    for use in turn.tool_uses:
        if use.id in issued:
            parts.append(b"id " + use.id.encode())
        else:
            parts.append(use.name.encode("utf-8", "surrogatepass"))
            parts.append(canonical_json(use.arguments))
    return KeyedTurn(turn=turn, digest=digest(*parts), reasoning_digest=_reasoning_digest(turn.reasoning))


def _comparable_text(turn: Turn) -> str:
    return turn.text.strip() if turn.role == "assistant" else turn.text


def _reasoning_digest(reasoning: str | None) -> bytes | None:
    trimmed = reasoning.strip() if reasoning else ""
    return digest(trimmed.encode("utf-8", "surrogatepass")) if trimmed else None


class Answer(msgspec.Struct, frozen=True):
    """An answer that a later request may build on."""

    call: CallId
    turn: Turn
    reasoning_digest: bytes | None
    num_sampled: int
    """Sampled tokens that the client has seen in full; fewer than all when the answer was cut."""
    rest: str = ""
    """Text that the client saw after them: the beginning of a token that a stop string cut in two."""


class Match(msgspec.Struct, frozen=True):
    """Where a request stands among what was recorded."""

    keys: tuple[bytes, ...]
    """Chain key of every prefix, the shortest first; the last one is the whole context's."""
    num_turns: int
    """Leading turns covered by `answer` (its message included). 0 without an answer."""
    answer: Answer | None
    """The deepest answer that stands in this context right where it was given."""
    shares: CallId | None
    """Without an answer: a call whose context begins with the same `num_shared` turns."""
    num_shared: int
    earlier: tuple[CallId, ...]
    """Calls that were asked exactly this context, in the order of asking."""

    @property
    def key(self) -> bytes:
        """Chain key of the whole context."""
        return self.keys[-1]


class ContextIndex:
    """Everything that one execution asked and was answered, keyed by chain."""

    def __init__(self) -> None:
        self._asked: dict[bytes, list[CallId]] = {}
        self._prefixes: dict[bytes, CallId] = {}
        self._answers: dict[bytes, list[Answer]] = {}

    def match(self, root: bytes, turns: Sequence[KeyedTurn]) -> Match:
        """Walk the context once and find the deepest recorded answer in it. `root` digests the tools."""
        key, answer, depth, shares, num_shared = root, None, 0, None, 0
        keys = [root]
        for index, keyed in enumerate(turns):
            key = self._step(key, keyed)
            keys.append(key)
            if keyed.turn.role == "assistant":
                given = self._given(key, keyed)
                if given is not None:
                    answer, depth = given, index + 1
            sharer = self._prefixes.get(key)
            if sharer is not None:
                shares, num_shared = sharer, index + 1
        return Match(
            keys=tuple(keys),
            num_turns=depth,
            answer=answer,
            shares=shares,
            num_shared=num_shared,
            earlier=tuple(self._asked.get(key, ())),
        )

    def ask(self, call: CallId, matched: Match) -> None:
        """Remember that `call` was asked the context that `match` found to be `matched`."""
        self._asked.setdefault(matched.key, []).append(call)
        for key in matched.keys[matched.num_shared + 1 :]:
            self._prefixes.setdefault(key, call)

    def remember_asked(self, call: CallId, key: bytes) -> None:
        """As `ask`, from a journal: only the key of the whole context is known."""
        self._asked.setdefault(key, []).append(call)
        self._prefixes.setdefault(key, call)

    def answer(self, key: bytes, answer: Answer, issued: Mapping[str, object]) -> None:
        """Remember what the context `key` was answered. A cut answer may be remembered, too, as far as it was seen."""
        keyed = key_turn(answer.turn, issued)
        step = blake2b(key + keyed.digest, digest_size=DIGEST_BYTES).digest()
        known = self._answers.setdefault(step, [])
        known[:] = [other for other in known if other.call != answer.call] + [answer]

    def _step(self, key: bytes, keyed: KeyedTurn) -> bytes:
        step = blake2b(key + keyed.digest, digest_size=DIGEST_BYTES).digest()
        if keyed.reasoning_digest is not None and step in self._answers and self._given(step, keyed) is None:
            return digest(key, keyed.digest, keyed.reasoning_digest)  # the harness changed the reasoning: another context
        return step

    def _given(self, key: bytes, keyed: KeyedTurn) -> Answer | None:
        answers = self._answers.get(key)
        if answers is None:
            return None
        if keyed.reasoning_digest is None:
            return answers[0]
        return next((answer for answer in answers if answer.reasoning_digest == keyed.reasoning_digest), None)
