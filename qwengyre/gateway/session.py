"""One attempt of one execution: what it asked, what it was answered, and where a new request goes in its tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN, common_prefix
from qwengyre.core.errors import ContextOverflow
from qwengyre.core.ids import CallId
from qwengyre.gateway.dialects import BY_NAME
from qwengyre.gateway.hints import GivenAnswer, HintReader
from qwengyre.gateway.protocol.deltas import AnswerSoFar
from qwengyre.gateway.protocol.fields import InvalidRequest, Json
from qwengyre.gateway.protocol.request import ItemCache, ModelRequest, said_in_blocks
from qwengyre.gateway.rendering import How, Rendering
from qwengyre.gateway.seen import Seen
from qwengyre.trajectory.calls import CallLog, RecordedCall
from qwengyre.trajectory.match import Answer, ContextIndex, Match, ToolUse, Turn, digest
from qwengyre.trajectory.records import BranchCause, CallStarted

LARGE_CHARS = 4_000
"""A text this long takes a tokenizer 1 or 2 ms, which is all that the streams of others should wait."""
TURN_CHARS = 64
"""A turn costs the template as much as this many characters of text cost the tokenizer, at least."""
NO_TOOLS = digest(b"no tools")


class Continuation(msgspec.Struct, frozen=True):
    """Where a request goes: `sequence(base)[:base_tokens] + new_T` is its prompt."""

    base: int
    base_tokens: int
    new_T: np.ndarray
    """int32"""
    cause: BranchCause
    matched: Match
    ordinal: int
    first_index: int
    """Tokens of the answer that exist already: the call goes on with an abandoned one."""
    is_rendered_anew: bool

    @property
    def num_prompt(self) -> int:
        return self.base_tokens + len(self.new_T)


class Session:
    def __init__(self, calls: CallLog, rendering: Rendering, hints: HintReader):
        self.opened, self.calls = calls.opened, calls
        self.index = ContextIndex()
        self.issued: dict[str, ToolUse] = {}
        self.items = ItemCache(self.issued)
        self.answers: dict[CallId, GivenAnswer] = {}
        """By which an answer is recognised where it comes back in a fresh context."""
        self._rendering, self._hints = rendering, hints

    def match(self, request: ModelRequest) -> Match:
        return self.index.match(request.tools.digest or NO_TOOLS, request.turns)

    def place(self, request: ModelRequest, matched: Match) -> Continuation:
        """Give a matched request its place and encode what is new in it. Raises ContextOverflow, InvalidRequest."""
        placement = self._again(matched) if matched.earlier else self._anew(request, matched)
        if placement.num_prompt - placement.first_index >= self.opened.max_context_tokens:
            raise ContextOverflow(num_tokens=placement.num_prompt, max_tokens=self.opened.max_context_tokens)
        return placement

    def has_much_to_encode(self, request: ModelRequest, matched: Match) -> bool:
        """Whether what is new in it is so long that its tokens should be made beside the event loop."""
        texts = _new_texts(request, matched)
        return sum(map(len, texts)) + TURN_CHARS * len(texts) >= LARGE_CHARS

    def encode_ahead(self, request: ModelRequest, matched: Match) -> None:
        """Encode a long request, in any thread: placing it then finds its texts encoded. Raises ContextOverflow, InvalidRequest.

        What cannot fit is not encoded to its end; the number of tokens in the error is then an estimate.
        """
        most, texts = self.opened.max_context_tokens, _new_texts(request, matched)
        num_tokens = num_chars = 0
        for piece in (text[at : at + LARGE_CHARS] for text in texts for at in range(0, len(text), LARGE_CHARS)):
            num_tokens += self._rendering.tokenizer.count(piece)
            num_chars += len(piece)
            if num_tokens > most + num_chars // LARGE_CHARS:
                raise ContextOverflow(num_tokens=num_tokens * sum(map(len, texts)) // num_chars, max_tokens=most)
        self._render(request)

    def count(self, request: ModelRequest, matched: Match) -> int:
        """Tokens of the prompt that this request would be, without asking it."""
        if matched.earlier:
            call = self.calls[matched.earlier[0]]
            return call.num_prompt - call.started.first_index
        return self._anew(request, matched).num_prompt

    def ask(self, request: ModelRequest, placement: Continuation, headers: Mapping[str, str], at: float) -> CallStarted:
        """The record of a placed request."""
        return CallStarted(
            session=self.opened.session,
            call=len(self.calls),
            base=placement.base,
            base_tokens=placement.base_tokens,
            context_ids=placement.new_T.astype(TOKEN, copy=False).tobytes(),
            cause=placement.cause,
            hints=self._hints.read(
                request,
                headers,
                self.answers,
                is_fresh=self._is_fresh(placement),
                num_known=placement.matched.num_turns,
            ),
            at=at,
            key=placement.matched.key,
            ordinal=placement.ordinal,
            first_index=placement.first_index,
            dialect=request.dialect,
            stops=request.stops,
            call_limit=request.calls.value,
        )

    def seed(self, started: CallStarted) -> int:
        """Randomness of an answer: of the run, the execution, the context and the retry; never of the order of arrival."""
        opened = self.opened
        key = digest(b"%d" % opened.seed, opened.execution.encode(), started.key, b"%d" % started.ordinal)
        return int.from_bytes(key[:8], "little") >> 1

    def tool_use_id(self, started: CallStarted, index: int) -> str:
        """Unique in the execution, and the same whatever else was asked meanwhile."""
        opened = self.opened
        where = f"{opened.execution} {opened.attempt} {started.ordinal} {index}".encode()
        return BY_NAME[started.dialect].tool_id_prefix + digest(b"tool", where, started.key).hex()[:24]

    def sampling_room(self, started: CallStarted, wanted: int | None) -> int:
        """Most tokens that this call may still sample: the run's limit, the client's, and what fits the context."""
        call = self.calls[started.call]
        limit = self.opened.max_tokens_per_call if wanted is None else min(self.opened.max_tokens_per_call, wanted)
        room = self.opened.max_context_tokens - (call.num_prompt - started.first_index)
        return max(0, min(limit, room) - started.first_index - call.num_sampled)

    def learn(self, call: RecordedCall, said: AnswerSoFar, seen: Seen) -> None:
        """Remember an answer as far as the client saw it: `seen`, which reads as `said`."""
        turn = said_in_blocks(said.blocks()) if BY_NAME[call.started.dialect].has_blocks else said.turn()
        for use in turn.tool_uses:
            self.issued[use.id] = use
        self.items.said[answer_id(call.id)] = said.blocks()
        reasoning = (turn.reasoning or "").strip()
        answer = Answer(
            call=call.id,
            turn=turn,
            reasoning_digest=digest(reasoning.encode("utf-8", "surrogatepass")) if reasoning else None,
            num_sampled=seen.num_tokens,
            rest=seen.rest,
        )
        self.index.answer(call.started.key, answer, self.issued)
        self.answers[call.id] = GivenAnswer.of(turn)

    def _is_fresh(self, placement: Continuation) -> bool:
        return placement.matched.answer is None and placement.cause is not BranchCause.RETRY

    def _again(self, matched: Match) -> Continuation:
        """The same context again: go on with the answer that was cut off, or sample another one beside it."""
        calls = [self.calls[call] for call in matched.earlier]
        last, first = calls[-1], calls[0]
        ordinals = [call.started.ordinal for call in calls]
        if last.is_abandoned:
            base, base_tokens = last, last.num_tokens
            ordinal, first_index = last.started.ordinal, last.num_answer
        else:
            base, base_tokens = first, first.num_prompt - first.started.first_index
            ordinal, first_index = max(ordinals) + 1, 0
        return Continuation(
            base=base.number,
            base_tokens=base_tokens,
            new_T=np.empty(0, TOKEN),
            cause=BranchCause.RETRY,
            matched=matched,
            ordinal=ordinal,
            first_index=first_index,
            is_rendered_anew=False,
        )

    def _anew(self, request: ModelRequest, matched: Match) -> Continuation:
        turns = [keyed.turn for keyed in request.turns]
        if matched.answer is not None:
            with _template_refusals():
                base, base_tokens, new_T, cause, is_anew = self._behind(matched.answer, matched.num_turns, turns, request)
        else:
            new_T, is_anew = self._render(request), False
            base, base_tokens, cause = self._beside(matched, turns, new_T)
            new_T = new_T[base_tokens:]
        return Continuation(
            base=base,
            base_tokens=base_tokens,
            new_T=new_T,
            cause=cause,
            matched=matched,
            ordinal=0,
            first_index=0,
            is_rendered_anew=is_anew,
        )

    def _render(self, request: ModelRequest) -> np.ndarray:
        with _template_refusals():
            return self._rendering.render([keyed.turn for keyed in request.turns], request.tools.specs)

    def _behind(
        self, answer: Answer, num_turns: int, turns: Sequence[Turn], request: ModelRequest
    ) -> tuple[int, int, np.ndarray, BranchCause, bool]:
        """A context that continues a recorded answer."""
        call = self.calls[answer.call]
        num_answer = answer.num_sampled
        known_T = self.calls.sequence(call.number, call.num_prompt - call.started.first_index + num_answer)
        rest_T = self._rest(call, answer, known_T, turns[:num_turns], request.tools.specs)
        seen_T = np.concatenate([known_T, rest_T])
        rendered = self._rendering.extend(seen_T, num_answer + len(rest_T), turns, num_turns, request.tools.specs)
        if rendered.how is How.RENDERED:
            shared = common_prefix(known_T, rendered.new_T)
            has_answers = any(turn.role == "assistant" for turn in turns[num_turns:])
            cause = BranchCause.DIVERGES if has_answers else BranchCause.RERENDERED
            return call.number, shared, rendered.new_T[shared:], cause, True
        cause = BranchCause.EXTENDS if rendered.how is How.BRIDGED else BranchCause.DIVERGES
        keep = min(rendered.keep, len(known_T))
        return call.number, keep, np.concatenate([seen_T[keep : rendered.keep], rendered.new_T]), cause, False

    def _rest(
        self, call: RecordedCall, answer: Answer, known_T: np.ndarray, turns: Sequence[Turn], tools: Sequence[Json]
    ) -> np.ndarray:
        """int32: what the client saw of an answer after its tokens in `known_T`, and the end of a tool call that was cut before it."""
        if answer.rest:
            return np.asarray(self._rendering.tokenizer.encode(answer.rest), TOKEN)
        is_cut = call.finished is None or call.is_abandoned
        if is_cut and answer.turn.tool_uses:
            return self._rendering.end_of_call(known_T, turns, tools)
        return np.empty(0, TOKEN)

    def _beside(self, matched: Match, turns: Sequence[Turn], new_T: np.ndarray) -> tuple[int, int, BranchCause]:
        """A context without a recorded answer: it may still begin like another one, beyond the system prompt."""
        shared_turns = turns[: matched.num_shared]
        if matched.shares is None or all(turn.role == "system" for turn in shared_turns):
            return -1, 0, BranchCause.ROOT
        base = self.calls[matched.shares]
        shared = common_prefix(self.calls.sequence(base.number, base.num_prompt), new_T)
        return base.number, shared, BranchCause.DIVERGES


def answer_id(call: CallId) -> str:
    """By what a client knows the answer to a call."""
    return call.replace("/", "-")


def _new_texts(request: ModelRequest, matched: Match) -> list[str]:
    return [keyed.turn.text for keyed in request.turns[max(matched.num_turns, matched.num_shared) :]]


@contextlib.contextmanager
def _template_refusals() -> Iterator[None]:
    """What a chat template raises is the client's to mend: it sent a conversation that this model cannot have."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"this model's chat template refuses the conversation: {error}") from error
