"""One live call: held, running, moved and continued until it ends, whoever listens.

The call runs in its own task, apart from any connection. Order of the truth: tokens are journalled, then shown; the end
is journalled, then the terminal event leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol

from qwengyre.core.arrays import LOGPROB, TOKEN, pack
from qwengyre.core.errors import EngineUnavailable, ExecutionClosed, JournalError, QwenGyreError, TokenCountMismatch
from qwengyre.core.ids import ServerId
from qwengyre.core.state_machine import advance
from qwengyre.engines.api import FinishReason, GenerateRequest, Sampling, Serving, TokenChunk
from qwengyre.gateway.answer_log import AnswerLog, Reader
from qwengyre.gateway.protocol.deltas import Ending, EndReason, Usage
from qwengyre.gateway.protocol.request import ModelRequest
from qwengyre.gateway.rendering import Rendering
from qwengyre.gateway.route import ExecutionRoute
from qwengyre.gateway.seen import MakeParser, Seen, num_tokens_of, seen_at
from qwengyre.gateway.session import Session
from qwengyre.gateway.stats import GatewayStats
from qwengyre.trajectory.calls import RecordedCall
from qwengyre.trajectory.records import CallEnd, CallFinished, CallRecord, TokensRouted, TokensSampled

log = logging.getLogger(__name__)
RETRY_SAME_SERVER_S = 1.0  # a server that just refused is asked again at most this often, unless the route changes sooner


class CallState(Enum):
    HELD = "held"
    """No engine works on it: waiting for a route."""
    RUNNING = "running"
    STOPPING = "stopping"
    """An abort was sent; the engine still owes the last tokens."""
    ENDED = "ended"


class Serve:
    """A server takes the call."""


class Stop:
    """Somebody wants the engine to stop: a move, a disconnect, or all that the client wants was said."""


class Park:
    """The engine has stopped or is gone: hold."""


class Finish:
    """The answer is whole, abandoned or failed."""


CALL: Final[Mapping[tuple[CallState, type], CallState]] = {
    (CallState.HELD, Serve): CallState.RUNNING,
    (CallState.RUNNING, Stop): CallState.STOPPING,
    (CallState.RUNNING, Park): CallState.HELD,
    (CallState.STOPPING, Park): CallState.HELD,
    (CallState.HELD, Finish): CallState.ENDED,
    (CallState.RUNNING, Finish): CallState.ENDED,
    (CallState.STOPPING, Finish): CallState.ENDED,
}


class Why(Enum):
    """Why an engine was told to stop."""

    MOVE = "move"
    LEFT = "left"
    """The last reader left before the end."""
    SAID_ALL = "said all"
    """A stop string came, or the one tool call that the client wants is whole."""


class Wiring(Protocol):
    """What a call needs of the gateway around it."""

    stats: GatewayStats
    rendering: Rendering
    stop_token_ids: tuple[int, ...]
    max_hold_s: float

    def record(self, session: Session, record: CallRecord) -> RecordedCall: ...
    async def wait_durable(self) -> None: ...
    def engine(self, server: ServerId) -> Serving | None: ...
    def abort_soon(self, server: ServerId, request_id: str) -> None: ...
    def now(self) -> float: ...


class LiveCall:
    def __init__(self, session: Session, request: ModelRequest, tokens: RecordedCall, make_parser: MakeParser, wiring: Wiring):
        self.tokens, self.answer = tokens, AnswerLog(request.stops, request.calls)
        self.state = CallState.HELD
        self.failure: QwenGyreError | None = None
        self.concluded = asyncio.Event()
        """The record is closed."""
        self.task: asyncio.Task[None] | None = None
        self._session, self._request, self._wiring = session, request, wiring
        self._make_parser, self._parser = make_parser, make_parser()
        self._parked = asyncio.Event()
        self._parked.set()
        self._why: Why | None = None
        self._left_at = 0
        self._reason: CallEnd | None = None
        self._server = ServerId("")
        """Where it ran last; empty before the first."""
        self._request_id = ""
        self._starts = self._num_moves = 0
        self._has_moved = self._is_first_chunk = False
        self._prompt_at_start = 0
        self._known_at_source = 0
        self._cached = 0
        self._num_issued = 0
        """Tool calls whose ids and whole arguments the session knows."""
        self._held_s = 0.0
        self._held_since: float | None = None
        """When the call was last without tokens for want of a server that works."""
        self._tried = -1
        """Generation of the route at the last start: while it stays, the same server is tried again only after a pause."""

    # --- for readers -----------------------------------------------------------------------------------------------------

    @property
    def is_attended(self) -> bool:
        return bool(self.answer.readers)

    @property
    def num_answer(self) -> int:
        """Tokens of the answer, those of the abandoned calls that it goes on with included."""
        return self.tokens.num_answer

    @property
    def num_prompt(self) -> int:
        return self.tokens.num_prompt - self.tokens.started.first_index

    def detach(self, reader: Reader) -> None:
        """A client left. Without any other and before the terminal event, the call is abandoned."""
        self.answer.readers.discard(reader)
        if self.is_attended or self.concluded.is_set():
            return
        self._left_at = reader.position
        if self.state in (CallState.HELD, CallState.ENDED):
            self._abandon()
        else:
            self._stop_engine(Why.LEFT)

    async def cut(self, deadline_s: float) -> None:
        """The execution is closed: stop the engine, keep its last tokens, tell whoever still listens."""
        self.failure = self.failure or ExecutionClosed("this execution is closed")
        self._left_at = len(self.answer.deltas)
        if self.state in (CallState.HELD, CallState.ENDED):
            self._abandon()
            return
        self._stop_engine(Why.LEFT)
        await self.wait_concluded(deadline_s)

    async def wait_concluded(self, deadline_s: float) -> None:
        """Until the record is closed. If the engine misses the deadline, its remaining tokens are written off."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.concluded.wait()
        except TimeoutError:
            log.warning("engine_does_not_stop", extra={"call": self.tokens.id, "server": self._server})
            self._abandon()
            if self.task is not None:
                self.task.cancel()

    def conclude(self) -> None:
        """Close the record: the terminal event leaves next."""
        if not self.concluded.is_set():
            self._close(self._reason or "error", abandoned=False, position=len(self.answer.deltas))

    def ending(self) -> Ending:
        """What the client is told at the end."""
        reason: EndReason = "length" if self._reason == "length" else "stop"
        if reason == "stop" and self.answer.num_tools:
            reason = "tool_calls"
        completion = self.num_answer if not self.answer.wanted.is_over else self._seen(len(self.answer.deltas)).num_tokens
        usage = Usage(
            prompt=self.num_prompt,
            completion=completion,
            cached=min(self._cached, self.num_prompt),
            reasoning=self._num_reasoning(),
        )
        return Ending(reason=reason, usage=usage, stop_string=self.answer.wanted.stop_string)

    # --- running ---------------------------------------------------------------------------------------------------------

    async def run(self, route: ExecutionRoute) -> None:
        """Serve the call to its end."""
        try:
            self._recall()
            while self.state is not CallState.ENDED:
                await self._generate(await self._wait_for_server(route), route)
        except QwenGyreError as error:
            self._fail(error)
        except Exception:  # the outermost frame of a call: one broken call must not end the others
            log.exception("call_broke", extra={"call": self.tokens.id})
            self._fail(QwenGyreError("the gateway failed on this call; its log says why"))

    def _recall(self) -> None:
        """Show what the calls before this one sampled of this answer; it may be whole already."""
        known = self._session.calls.answer_ids(self.tokens.number)
        if known:
            self._show(known)
            if known[-1] in self._wiring.stop_token_ids or self.answer.wanted.is_over:
                self._finish("stop")

    async def _wait_for_server(self, route: ExecutionRoute) -> ServerId:
        """The server to go to. Raises EngineUnavailable when the call has had none that works for `max_hold_s`."""
        since = self._wiring.now()
        if self._held_since is None:
            self._held_since = since
        left_s = self._wiring.max_hold_s - (since - self._held_since)
        try:
            async with asyncio.timeout(left_s):
                if route.generation == self._tried:
                    await route.wait_changed(since=self._tried, at_most_s=RETRY_SAME_SERVER_S)
                while route.server is None or self._wiring.engine(route.server) is None:
                    await route.wait_changed()
                return route.server
        except TimeoutError:
            raise EngineUnavailable(f"no server took this call within {self._wiring.max_hold_s:g} s") from None
        finally:
            self._held_s += self._wiring.now() - since

    async def _generate(self, server: ServerId, route: ExecutionRoute) -> None:
        """One stay at one server: until the answer is whole, or the call is held again."""
        room = self._session.sampling_room(self.tokens.started, self._request.max_tokens)
        if room <= 0:
            self._finish("length")
            return
        engine = self._wiring.engine(server)
        if engine is None:  # it has left meanwhile: the call goes on waiting
            return
        self._start(server)
        self._tried = route.generation
        try:
            async for chunk in engine.generate(self._generate_request(room)):
                await self._take(chunk)
                if chunk.finish_reason is not None:
                    self._stopped(chunk.finish_reason)
                    return
            self._lost("its stream ended without an end")
        except (EngineUnavailable, OSError) as error:
            self._lost(str(error))

    def _generate_request(self, room: int) -> GenerateRequest:
        started, opened = self.tokens.started, self._session.opened
        sampling = Sampling(
            temperature=opened.temperature,
            max_tokens=room,
            stop_token_ids=self._wiring.stop_token_ids,
            seed=self._session.seed(started),
            first_index=self.num_answer,
        )
        prompt_T = self._session.calls.sequence(started.call)
        return GenerateRequest(request_id=self._request_id, token_ids=prompt_T.tobytes(), sampling=sampling)

    def _start(self, server: ServerId) -> None:
        self._advance(Serve())
        if self._server and server != self._server:
            self._num_moves += 1
            self._has_moved = True
            self._wiring.stats.calls_moved += 1
        self._server, self._why = server, None
        self._starts += 1
        self._request_id = f"{self.tokens.id}#{self._starts}"
        self._prompt_at_start, self._is_first_chunk = self.tokens.num_tokens, True
        self._parked.clear()

    async def _take(self, chunk: TokenChunk) -> None:
        if self._is_first_chunk:
            self._count_cached(chunk.cached_tokens)
        if not chunk.token_ids:
            return
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise TokenCountMismatch(self.tokens.id, num_tokens=len(chunk.token_ids), num_logprobs=len(chunk.logprobs))
        self._held_since = None
        sampled = TokensSampled(
            session=self.tokens.started.session,
            call=self.tokens.number,
            token_ids=pack(chunk.token_ids, TOKEN),
            logprobs=pack(chunk.logprobs, LOGPROB),
            version=chunk.version,
            server=self._server,
        )
        self._wiring.record(self._session, sampled)
        if chunk.num_routed:
            where = (self.tokens.started.session, self.tokens.number, chunk.first_routed, chunk.num_routed)
            self._wiring.record(self._session, TokensRouted(*where, chunk.routes))
        self._wiring.stats.tokens_sampled += len(chunk.token_ids)
        await self._wiring.wait_durable()
        self._show(chunk.token_ids)

    def _count_cached(self, cached_tokens: int) -> None:
        stats, self._is_first_chunk = self._wiring.stats, False
        if self._starts == 1:
            self._cached = cached_tokens
            stats.tokens_prompted += self._prompt_at_start
            stats.tokens_cached += cached_tokens
        if self._has_moved:
            self._has_moved = False
            stats.tokens_recomputed_after_move += max(0, self._known_at_source - cached_tokens)

    def _show(self, token_ids: Sequence[int]) -> None:
        if self.answer.wanted.is_over:
            return
        self.answer.add(self._parser.feed(token_ids))
        if self.answer.wanted.is_over and self.state is CallState.RUNNING:
            self._stop_engine(Why.SAID_ALL)

    def _stopped(self, reason: FinishReason) -> None:
        """The engine said its last chunk."""
        if reason != "abort":
            self._finish(reason)
        else:
            self._lost("it aborted the call")

    def _lost(self, detail: str) -> None:
        """No engine works on the call any more: end it if that was the wish, else hold it."""
        if self._why is Why.SAID_ALL:
            self._finish("stop")
        elif self._why is Why.LEFT:
            self._parked.set()
            self._abandon()
        else:
            if self._why is None:
                log.info("call_lost_its_server", extra={"call": self.tokens.id, "server": self._server, "reason": detail})
            self._known_at_source = 0 if self._is_first_chunk else self.tokens.num_tokens - 1
            self._advance(Park())
            self._parked.set()

    def _finish(self, reason: CallEnd) -> None:
        """The answer is whole. Its record is closed when a client is about to be told, or has left."""
        self._advance(Finish())
        self._reason = reason
        self.answer.close(self._parser.finish())
        self._parked.set()
        if not self.is_attended:
            self._abandon()

    def _fail(self, error: QwenGyreError) -> None:
        if self.state is not CallState.ENDED:
            self._advance(Finish())
        self.failure = error
        self._parked.set()
        if not self.concluded.is_set():
            try:
                self._close("error", abandoned=True, position=len(self.answer.deltas), detail=str(error))
            except JournalError:  # the gateway is stopping because of it
                self.concluded.set()
        self.answer.end()

    # --- stopping and moving ---------------------------------------------------------------------------------------------

    @property
    def server(self) -> ServerId | None:
        """Where an engine works on the call now."""
        return self._server if self.state in (CallState.RUNNING, CallState.STOPPING) else None

    def stop_for_move(self) -> None:
        """Have the engine stop; `wait_parked` returns once its last tokens are here."""
        if self.state is CallState.RUNNING:
            self._advance(Stop())
            self._why = Why.MOVE

    def exported(self, num_tokens: int) -> None:
        """The source had computed this many tokens of the call, and said so: computing one of them again is waste.

        The last token is left out: its logits must always be computed.
        """
        self._known_at_source = min(num_tokens, self.tokens.num_tokens - 1)

    @property
    def request_id(self) -> str:
        return self._request_id

    async def wait_parked(self) -> None:
        """Until no engine works on this call."""
        await self._parked.wait()

    def _stop_engine(self, why: Why) -> None:
        if self.state is CallState.RUNNING:
            self._advance(Stop())
            self._wiring.abort_soon(self._server, self._request_id)
        self._why = why

    def _advance(self, event: Serve | Stop | Park | Finish) -> None:
        self.state = advance(CALL, f"call {self.tokens.id}", self.state, event)

    # --- the record ------------------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        if self.concluded.is_set():
            return
        was_held = self.state is CallState.HELD
        if self.state is not CallState.ENDED:
            self._advance(Finish())
        self._close(self._reason or "abort", abandoned=True, position=self._left_at)
        self.answer.end()
        if was_held and self.task is not None:
            self.task.cancel()

    def _close(self, reason: CallEnd, *, abandoned: bool, position: int, detail: str = "") -> None:
        is_stopped = self.answer.wanted.is_over
        seen = self._seen(position)
        before_stop = self._seen(len(self.answer.deltas)).num_tokens if is_stopped else self.num_answer
        finished = CallFinished(
            session=self.tokens.started.session,
            call=self.tokens.number,
            reason=reason,
            num_sampled=self.tokens.num_sampled,
            cached_tokens=self._cached,
            abandoned=abandoned,
            at=self._wiring.now(),
            num_moves=self._num_moves,
            held_s=round(self._held_s, 3),
            detail=detail,
            num_seen=seen.num_tokens,
            rest=seen.rest,
            num_masked=self.num_answer - before_stop,
        )
        self._wiring.record(self._session, finished)
        self._learn(position, also_before=abandoned)
        self._wiring.stats.count_finished(finished)
        self.concluded.set()

    def issue_tools(self) -> None:
        """Make the ids of the tool calls so far known to whoever parses the next request."""
        for use in self.answer.tool_uses(self._num_issued):
            self._session.issued[use.id] = use
        self._num_issued = max(0, self.answer.num_tools - 1)

    def learn_so_far(self) -> None:
        """Make known what a client may go on from although this call has not ended: it hung up, or does not read any further."""
        self._learn(max((reader.position for reader in self.answer.readers), default=self._left_at), also_before=True)

    def _learn(self, position: int, *, also_before: bool) -> None:
        """Remember the answer as a client at `position` has it; `also_before`, as one that broke off after an earlier tool call."""
        for cut in self.answer.cuts(position) if also_before else [position]:
            seen = self._seen(cut)
            if seen.num_tokens or seen.rest:
                self._session.learn(self.tokens, self.answer.said(cut), seen)

    def _num_reasoning(self) -> int:
        """Tokens of the answer up to the end of its reasoning."""
        reasoning = self.answer.said(len(self.answer.deltas)).turn().reasoning
        if not reasoning:
            return 0
        ids = self._session.calls.answer_ids(self.tokens.number)
        return num_tokens_of(reasoning, ids, self._wiring.rendering.tokenizer.decode)

    def _seen(self, position: int) -> Seen:
        """What a client at `position` of the answer saw."""
        ids = self._session.calls.answer_ids(self.tokens.number)
        return seen_at(self.answer, position, ids, self._make_parser, self._wiring.rendering.tokenizer.decode)
