"""The gateway's answers to its owner: one handler for every request of `control_api`."""

from __future__ import annotations

from collections.abc import Callable

from qwengyre.engines.api import Serving
from qwengyre.gateway.control_api import (
    AddServer,
    ClosedExecution,
    CloseExecution,
    GatewayReport,
    MoveCalls,
    Moved,
    OpenedExecution,
    OpenExecution,
    Ping,
    RemoveServer,
    ReportCounts,
    SetRoutes,
)
from qwengyre.gateway.gateway import Gateway
from qwengyre.gateway.moves import move
from qwengyre.gateway.stats import SessionCounts
from qwengyre.rpc.server import Done, Handlers
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.records import Opened

Connect = Callable[[AddServer], Serving]


class Control:
    """`connect` makes the client of an engine's address."""

    def __init__(self, gateway: Gateway, connect: Connect) -> None:
        self._gateway, self._connect = gateway, connect

    def handlers(self) -> Handlers:
        return {
            OpenExecution: self._open,
            CloseExecution: self._close,
            AddServer: self._add_server,
            RemoveServer: self._remove_server,
            SetRoutes: self._set_routes,
            MoveCalls: self._move,
            ReportCounts: self._report,
            Ping: self._ping,
        }

    async def _open(self, asked: OpenExecution) -> OpenedExecution:
        opened = Opened(
            session=-1,
            execution=asked.execution,
            attempt=asked.attempt,
            seed=asked.seed,
            temperature=asked.temperature,
            trainable=asked.trainable,
            max_context_tokens=asked.max_context_tokens,
            max_tokens_per_call=asked.max_tokens_per_call,
            model=asked.model,
        )
        execution = await self._gateway.open(opened)
        if asked.server is not None:
            execution.route.set(asked.server)
        await self._gateway.wait_durable()
        return OpenedExecution(key=execution.keys.key, path=execution.keys.path)

    async def _close(self, asked: CloseExecution) -> ClosedExecution:
        calls = await self._gateway.close(asked.execution)
        await self._gateway.wait_durable()
        return ClosedExecution(opened=calls.opened, records=calls.records(), counts=_counts(calls))

    async def _add_server(self, asked: AddServer) -> Done:
        await self._gateway.set_server(asked.server, self._connect(asked))
        return Done()

    async def _remove_server(self, asked: RemoveServer) -> Done:
        await self._gateway.set_server(asked.server, None)
        return Done()

    async def _set_routes(self, asked: SetRoutes) -> Done:
        for execution, server in asked.routes.items():
            if (live := self._gateway.executions.get(execution)) is not None:
                live.route.set(server)
        return Done()

    async def _move(self, asked: MoveCalls) -> Moved:
        return await move(self._gateway, asked)

    async def _report(self, asked: ReportCounts) -> GatewayReport:
        return GatewayReport(self._gateway.stats)

    async def _ping(self, asked: Ping) -> Done:
        return Done()


def _counts(calls: CallLog) -> SessionCounts:
    ends = [call.finished for call in calls if call.finished is not None]
    return SessionCounts(
        calls=len(calls),
        tokens=calls.num_distinct(),
        tokens_sampled=sum(call.num_sampled for call in calls),
        num_moves=sum(end.num_moves for end in ends),
        held_s=sum(end.held_s for end in ends),
    )
