"""The gateway's state: executions, servers, routes, live calls and the journal they are rebuilt from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from qwengyre.core.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    ExecutionClosed,
    JournalError,
    UnknownExecution,
)
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import Serving
from qwengyre.gateway.answer_log import AnswerLog, Reader
from qwengyre.gateway.budget import Budget
from qwengyre.gateway.call import LiveCall
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.hints import HintReader
from qwengyre.gateway.keys import Keys, derive, fingerprint
from qwengyre.gateway.protocol.answer import Parser
from qwengyre.gateway.protocol.deltas import TextDelta
from qwengyre.gateway.protocol.fields import InvalidRequest, Json
from qwengyre.gateway.protocol.request import CallLimit, ModelRequest
from qwengyre.gateway.protocol.wanted import CallsAsText
from qwengyre.gateway.rendering import TAIL_TOKENS, Rendering
from qwengyre.gateway.route import ExecutionRoute
from qwengyre.gateway.seen import MakeParser, Seen, seen_at
from qwengyre.gateway.session import Session
from qwengyre.gateway.stats import GatewayStats
from qwengyre.journal import Journal, read
from qwengyre.trajectory.attempts import Attempts, recorded_attempts
from qwengyre.trajectory.calls import CallLog, RecordedCall
from qwengyre.trajectory.harness_rules import BUILTIN, HarnessRules
from qwengyre.trajectory.match import Match
from qwengyre.trajectory.records import CallFinished, CallRecord, CallStarted, Closed, GatewayRecord, Opened

log = logging.getLogger(__name__)
CUT_DEADLINE_S = 10.0
"""How long an engine may take to stop a call, and the close of an execution waits for the last tokens of its running calls."""
CONCURRENT_ENCODINGS = 2
"""Threads that encode very long prompts beside the event loop."""
KEPT_CLOSED = 32
"""Closed executions whose records stay in memory, should the answer to a close be lost."""


class Execution:
    """An attempt that is open: its records, its route, its live calls."""

    def __init__(self, session: Session, keys: Keys, budget: Budget):
        self.session, self.keys, self.budget = session, keys, budget
        self.route = ExecutionRoute()
        self.live: dict[int, LiveCall] = {}
        """Calls that have not been concluded, by number."""

    @property
    def id(self) -> ExecutionId:
        return self.session.opened.execution

    def issue_tools(self) -> None:
        """Make the tool calls of running answers known: a client may go on from one before its answer has ended."""
        for call in self.live.values():
            call.issue_tools()

    def contexts(self, first: Set[int]) -> list[int]:
        """Calls whose sequences end a path, `first` before all others, then the latest first."""
        calls = self.session.calls
        bases = ((calls[call.started.base], call.base_tokens) for call in calls if call.base is not None)
        inner = {base.number for base, base_tokens in bases if base_tokens > base.num_prompt}
        ends = {call.number for call in calls} - inner - set(first)
        return sorted(first, reverse=True) + sorted(ends, reverse=True)


class Gateway:
    """One owner of everything; used from one event loop. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        config: GatewayConfig,
        rendering: Rendering,
        journal: Journal,
        secret: bytes,
        clock: Callable[[], float],
        rules: Sequence[HarnessRules] = BUILTIN,
    ):
        self.config, self.rendering, self.stats = config, rendering, GatewayStats()
        self.stop_token_ids = rendering.stop_token_ids
        self.max_hold_s = config.max_hold_s
        self.now = clock
        self.executions: dict[ExecutionId, Execution] = {}
        self._journal, self._secret, self._hints = journal, secret, HintReader(rules)
        self._keys: dict[bytes, Execution] = {}
        self._engines: dict[ServerId, Serving] = {}
        self._closed: dict[ExecutionId, CallLog] = {}
        self._budgets: dict[int, Budget] = {}
        """Of the executions that are open, by session."""
        self._next_session = 0
        """Then every `config.processes`-th: no other gateway of the run has the same."""
        self._encoding = asyncio.Semaphore(CONCURRENT_ENCODINGS)
        self._tasks: asyncio.TaskGroup | None = None
        self._until = asyncio.Event()
        self.broken: JournalError | None = None
        """Why the gateway had to stop by itself."""

    # --- life ------------------------------------------------------------------------------------------------------------

    async def serve(self, until: asyncio.Event) -> None:
        """Run the tasks of all calls until `until` is set."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks, self._until = tasks, until
            await until.wait()
            for execution in list(self.executions.values()):
                for call in list(execution.live.values()):
                    if call.task is not None:
                        call.task.cancel()
        self._tasks = None

    def replay(self, first_session: int = 0) -> int:
        """Rebuild what was open from the journal; return the number of records. Calls that were running are abandoned.

        Sessions are numbered from `first_session` on. Two passes, so that the second skips what was closed.
        """
        self._next_session = first_session
        ended, num_records = self._ended_sessions()
        sessions: dict[int, Session] = {}
        attempts = Attempts(wanted=lambda opened: opened.session not in ended)
        before = 0
        for position, record in read(self._journal.path, GatewayRecord):
            num_bytes, before = position - before, position
            calls = attempts.apply(record)
            if calls is not None and isinstance(record, Opened):
                sessions[record.session] = self._begin(calls)
            elif calls is not None and isinstance(record, CallStarted | CallFinished):
                self._remember(sessions[record.session], record)
            self._count_recorded(record, num_bytes)
        for session in sessions.values():
            self._abandon_unfinished(session)
        return num_records

    def _ended_sessions(self) -> tuple[set[int], int]:
        """Sessions that were closed, or thrown away for a later attempt; and how many records there are."""
        ended: set[int] = set()
        latest: dict[ExecutionId, int] = {}
        num_records = 0
        for _, record in read(self._journal.path, GatewayRecord):
            num_records += 1
            self._see_session(record.session)
            if isinstance(record, Closed):
                ended.add(record.session)
            elif isinstance(record, Opened):
                before = latest.get(record.execution)
                if before is not None:
                    ended.add(before)
                latest[record.execution] = record.session
        return ended, num_records

    def _remember(self, session: Session, record: CallStarted | CallFinished) -> None:
        if isinstance(record, CallStarted):
            session.index.remember_asked(session.calls.id_of(record.call), record.key)
        else:
            self._relearn(session, record)

    def record(self, session: Session, record: CallRecord) -> RecordedCall:
        """Journal what happened to a call, then hold it in memory. Raises the JournalError family."""
        self.journal(record)
        return session.calls.apply(record)

    def journal(self, record: GatewayRecord) -> None:
        """Raises the JournalError family; then nothing can be promised any more, and the gateway stops (`broken` says why)."""
        before = self._journal.position
        try:
            self._count_recorded(record, self._journal.append(record) - before)
        except JournalError as error:
            if self.broken is None:
                log.critical("journal_broken", extra={"reason": str(error)})
                self.broken = error
                self._until.set()
            raise

    def _count_recorded(self, record: GatewayRecord, num_bytes: int) -> None:
        if (budget := self._budgets.get(record.session)) is not None:
            budget.journal(num_bytes)

    async def wait_durable(self) -> None:
        if self._journal.policy == "disk":
            await self._journal.wait_durable()

    # --- executions ------------------------------------------------------------------------------------------------------

    async def open(self, opened: Opened) -> Execution:
        """Open an execution (its `session` is given here); the same attempt again is answered the same.

        A higher attempt throws the earlier one away. Raises ConfigError for a lower one.
        """
        known = self.executions.get(opened.execution)
        if known is not None:
            attempt = known.session.opened.attempt
            if attempt == opened.attempt:
                return known
            if attempt > opened.attempt:
                raise ConfigError(f"{opened.execution} is at attempt {attempt} already", key="attempt")
            await self._shut(known)
        opened = msgspec.structs.replace(
            opened,
            session=self._next_session,
            max_context_tokens=min(opened.max_context_tokens, self.config.max_context_tokens),
            max_tokens_per_call=min(opened.max_tokens_per_call, self.config.max_tokens_per_call),
        )
        self.journal(opened)
        self._begin(CallLog(opened))
        return self.executions[opened.execution]

    async def close(self, execution: ExecutionId) -> CallLog:
        """Kill the keys, end the live calls and give the records; again and after a restart, too.

        Raises UnknownExecution for one that was never opened.
        """
        known = self.executions.get(execution)
        if known is not None:
            await self._shut(known)
        closed = self._closed.get(execution)
        return closed if closed is not None else self._read_closed(execution)

    def by_key(self, key: str) -> Execution | None:
        return self._keys.get(fingerprint(key))

    def by_path(self, secret: str) -> Execution | None:
        return self._keys.get(fingerprint(f"path {secret}"))

    # --- servers ---------------------------------------------------------------------------------------------------------

    def engine(self, server: ServerId) -> Serving | None:
        return self._engines.get(server)

    def servers(self) -> list[ServerId]:
        return list(self._engines)

    async def set_server(self, server: ServerId, engine: Serving | None) -> None:
        """Add, replace or (None) remove a server; calls that are routed to it go on there, or are held."""
        old = self._engines.pop(server, None)
        if engine is not None:
            self._engines[server] = engine
        for execution in self.executions.values():
            if execution.route.server == server:
                execution.route.touch()
        if old is not None:
            await old.close()

    def abort_soon(self, server: ServerId, request_id: str) -> None:
        engine = self._engines.get(server)
        if engine is not None and self._tasks is not None:
            self._tasks.create_task(_abort(engine, request_id))

    # --- calls -----------------------------------------------------------------------------------------------------------

    async def call(self, execution: Execution, request: ModelRequest, headers: Mapping[str, str]) -> tuple[LiveCall, Reader]:
        """Start, join or go on with a call. Raises InvalidRequest, ContextOverflow, ExecutionClosed, EngineUnavailable."""
        execution.budget.check_journal()
        with execution.budget.busy():
            _learn_live(execution, request)
        joined = await self._joinable(execution, request, headers)
        if joined is not None:
            self.stats.calls_joined += 1
            return joined, joined.answer.attach()
        if len(execution.live) >= self.config.max_calls_per_execution:
            raise InvalidRequest("too many calls at once for this execution", status=429, code="too_many_calls")
        session = execution.session
        matched = await self._match(execution, request)
        if self.executions.get(execution.id) is not execution:
            raise ExecutionClosed("this execution was closed while the request was read")
        if self._tasks is None or self._until.is_set():
            raise EngineUnavailable("this gateway is stopping")
        with execution.budget.busy():
            placement = session.place(request, matched)
            call = self.record(session, session.ask(request, placement, headers, self.now()))
            session.index.ask(call.id, placement.matched)
        self.stats.calls_started += 1
        self.stats.calls_joined += placement.first_index > 0
        self.stats.tokens_rendered += len(placement.new_T)
        self.stats.rerendered += placement.is_rendered_anew
        live = self._start(self._tasks, execution, request, call)
        return live, live.answer.attach()

    async def count(self, execution: Execution, request: ModelRequest) -> int:
        """Tokens of the prompt that this request would be, without asking it. Raises InvalidRequest."""
        try:
            matched = await self._match(execution, request)
            with execution.budget.busy():
                return execution.session.count(request, matched)
        except ContextOverflow as error:
            return error.num_tokens

    async def _match(self, execution: Execution, request: ModelRequest) -> Match:
        """Match a request; one that is very long is encoded beside the event loop before, so that other streams go on."""
        session = execution.session
        with execution.budget.busy():
            matched = session.match(request)
        if session.has_much_to_encode(request, matched):
            async with self._encoding:
                await asyncio.to_thread(session.encode_ahead, request, matched)
            matched = session.match(request)
        return matched

    def _start(self, tasks: asyncio.TaskGroup, execution: Execution, request: ModelRequest, call: RecordedCall) -> LiveCall:
        session = execution.session
        live = LiveCall(session, request, call, self._make_parser(session, call, request.tools.specs), self)
        execution.live[call.number] = live
        live.task = tasks.create_task(self._run(execution, live))
        return live

    def _make_parser(self, session: Session, call: RecordedCall, tools: Sequence[Json]) -> MakeParser:
        started = call.started
        tail = session.calls.sequence(call.number, call.num_prompt - started.first_index)[-TAIL_TOKENS:].tolist()

        def make() -> Parser:
            parser = self.rendering.parser(lambda index: session.tool_use_id(started, index), tail, tools)
            return CallsAsText(parser) if started.call_limit == CallLimit.NONE.value else parser

        return make

    async def _run(self, execution: Execution, live: LiveCall) -> None:
        try:
            await live.run(execution.route)
            await live.concluded.wait()
        finally:
            execution.live.pop(live.tokens.number, None)

    async def _joinable(self, execution: Execution, request: ModelRequest, headers: Mapping[str, str]) -> LiveCall | None:
        """The live call that this request asks for again, if it is a retry and not a second opinion.

        A call that nobody listens to any more is waited for: what it sampled is not sampled again.
        """
        if not execution.live:
            return None
        key = execution.session.match(request).key
        live = next((call for call in reversed(execution.live.values()) if call.tokens.started.key == key), None)
        if live is None:
            return None
        if not live.is_attended:
            await live.wait_concluded(CUT_DEADLINE_S)
            execution.live.pop(live.tokens.number, None)
            return None
        return live if headers.get("x-stainless-retry-count", "0") != "0" else None

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _begin(self, calls: CallLog) -> Session:
        opened = calls.opened
        session = Session(calls, self.rendering, self._hints)
        keys = derive(self._secret, opened.execution, opened.attempt)
        execution = Execution(session, keys, Budget(self.config))
        before = self.executions.get(opened.execution)
        if before is not None:
            self._forget_keys(before)
            self._budgets.pop(before.session.opened.session, None)
        self._budgets[opened.session] = execution.budget
        self.executions[opened.execution] = execution
        self._closed.pop(opened.execution, None)
        self._keys[fingerprint(keys.key)] = execution
        self._keys[fingerprint(f"path {keys.path_secret}")] = execution
        self._see_session(opened.session)
        return session

    def _see_session(self, session: int) -> None:
        self._next_session = max(self._next_session, session + self.config.processes)

    async def _shut(self, execution: Execution) -> None:
        self._forget_keys(execution)
        await asyncio.gather(*(call.cut(CUT_DEADLINE_S) for call in list(execution.live.values())))
        self.journal(Closed(session=execution.session.opened.session))
        self._end(execution.session)

    def _end(self, session: Session) -> None:
        execution = self.executions.get(session.opened.execution)
        self._budgets.pop(session.opened.session, None)
        if execution is not None and execution.session is session:
            del self.executions[session.opened.execution]
            self._forget_keys(execution)
            self._closed[session.opened.execution] = session.calls
            while len(self._closed) > KEPT_CLOSED:
                del self._closed[next(iter(self._closed))]

    def _forget_keys(self, execution: Execution) -> None:
        self._keys.pop(fingerprint(execution.keys.key), None)
        self._keys.pop(fingerprint(f"path {execution.keys.path_secret}"), None)

    def _read_closed(self, execution: ExecutionId) -> CallLog:
        """The last attempt of a closed execution, from the journal."""
        records = (record for _, record in read(self._journal.path, GatewayRecord))
        attempts = list(recorded_attempts(records, lambda opened: opened.execution == execution))
        if not attempts:
            raise UnknownExecution(execution)
        return max(attempts, key=lambda calls: calls.opened.session)

    def _relearn(self, session: Session, ended: CallFinished) -> None:
        """What a client was answered before a restart, parsed again from the tokens it saw."""
        call = session.calls[ended.call]
        ids = session.calls.answer_ids(ended.call)[: ended.num_seen]
        if not ids and not ended.rest:
            return
        make_parser = self._make_parser(session, call, ())
        parser, answer = make_parser(), AnswerLog(())
        answer.close([*parser.feed(ids), *parser.finish(), *([TextDelta(text=ended.rest)] if ended.rest else ())])
        whole = len(answer.deltas)
        for cut in answer.cuts(whole) if ended.abandoned else [whole]:
            seen = seen_at(answer, cut, ids, make_parser, self.rendering.tokenizer.decode)
            session.learn(call, answer.said(cut), Seen(ended.num_seen, ended.rest) if cut == whole else seen)

    def _abandon_unfinished(self, session: Session) -> None:
        for call in session.calls:
            if call.finished is None:
                seen, num_masked = self._seen_unfinished(session, call)
                finished = CallFinished(
                    session=session.opened.session,
                    call=call.number,
                    reason="abort",
                    num_sampled=call.num_sampled,
                    cached_tokens=0,
                    abandoned=True,
                    at=self.now(),
                    detail="the gateway was stopped",
                    num_seen=seen.num_tokens,
                    rest=seen.rest,
                    num_masked=num_masked,
                )
                self.record(session, finished)
                self._relearn(session, finished)

    def _seen_unfinished(self, session: Session, call: RecordedCall) -> tuple[Seen, int]:
        """What a client may have seen of an answer that was running, and how many tokens came after its stop string."""
        ids = session.calls.answer_ids(call.number)
        make_parser = self._make_parser(session, call, ())
        answer = AnswerLog(call.started.stops, CallLimit(call.started.call_limit))
        answer.add(make_parser().feed(ids))
        seen = seen_at(answer, len(answer.deltas), ids, make_parser, self.rendering.tokenizer.decode)
        return seen, len(ids) - seen.num_tokens if answer.wanted.is_over else 0


def _learn_live(execution: Execution, request: ModelRequest) -> None:
    """Make known the answers in `request` whose calls still run: the client hung up at a whole tool call, or reads no further."""
    if not execution.live:
        return
    depth_of = {key: depth for depth, key in enumerate(execution.session.match(request).keys[:-1])}
    for call in list(execution.live.values()):
        depth = depth_of.get(call.tokens.started.key)
        if depth is not None and request.turns[depth].is_answer:
            call.learn_so_far()


async def _abort(engine: Serving, request_id: str) -> None:
    try:
        async with asyncio.timeout(CUT_DEADLINE_S):
            await engine.abort([request_id])
    except (EngineError, TimeoutError) as error:
        log.info("abort_not_delivered", extra={"request": request_id, "reason": str(error)})
    except Exception:  # the outermost frame of its task: an abort that is lost must not end the gateway
        log.exception("abort_broke", extra={"request": request_id})


def open_journal(path: str | Path, config: GatewayConfig) -> Journal:
    """The gateway's own journal. Raises the JournalError family."""
    return Journal.open(path, GatewayRecord, policy=config.sync)
