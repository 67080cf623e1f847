"""What the gateway can be asked by its owner, as one table: a request, and its reply. The runtime imports this.

    OpenExecution   -> OpenedExecution   may call from now on; held until it has a route
    CloseExecution  -> ClosedExecution   keys die, running calls are cut, the records come back; again the same
    AddServer       -> Done              again with another address: calls go on there
    RemoveServer    -> Done              calls that are routed there are held
    SetRoutes       -> Done              {execution: server or None}; None holds
    MoveCalls       -> Moved             hold, carry KV, route, go on
    ReportCounts    -> GatewayReport
    Ping            -> Done              this process runs

They go over the wire of `rpc/`, on a Unix socket that harnesses never see. Refused with UnknownExecution, ConfigError (an older
attempt), or what went wrong.
"""

from __future__ import annotations

import msgspec

from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.stats import GatewayStats, SessionCounts
from qwengyre.trajectory.records import CallRecord, Opened


class OpenExecution(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Opening the same attempt again answers the same; a higher attempt throws the earlier one's calls away."""

    execution: ExecutionId
    attempt: int = 0
    seed: int = 0
    temperature: float = 1.0
    trainable: bool = True
    max_context_tokens: int = 1 << 30
    max_tokens_per_call: int = 1 << 30
    model: str = "policy"
    server: ServerId | None = None
    """Where its calls go from the start; None holds them until a route is set."""


class OpenedExecution(msgspec.Struct, frozen=True, tag=True):
    key: str
    """For `OPENAI_API_KEY` and the like."""
    path: str
    """`/e/<secret>/v1`, to be put after scheme, host and port. Without `/v1` for Anthropic clients."""


class CloseExecution(msgspec.Struct, frozen=True, tag=True):
    execution: ExecutionId


class AddServer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    server: ServerId
    address: str
    """`tcp://HOST:PORT` or `unix:PATH` of an EngineServer."""
    secret: bytes
    """What both ends of that wire must know."""


class RemoveServer(msgspec.Struct, frozen=True, tag=True):
    server: ServerId


class SetRoutes(msgspec.Struct, frozen=True, tag=True):
    routes: dict[ExecutionId, ServerId | None]
    """Executions that are not open, because they were closed meanwhile, are passed over."""


class MoveCalls(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    source: ServerId
    moves: dict[ExecutionId, ServerId | None]
    deadline_s: float = 60.0
    """KV that is not at its destination by then is computed again there: an engine that hangs does not hold up the move."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """What a move did."""

    calls_moved: int
    """Running calls that were stopped and go on elsewhere."""
    contexts_moved: int
    """Contexts whose KV was carried, idle ones included."""
    tokens_moved: int
    """Tokens whose KV was carried."""
    tokens_recomputed: int
    """Tokens of running calls that the source had computed and the destination has not."""
    kv_bytes: int
    seconds: float


class ClosedExecution(msgspec.Struct, frozen=True, tag=True):
    opened: Opened
    records: list[CallRecord]
    """What `trajectory` builds the tree from, the last attempt's."""
    counts: SessionCounts


class ReportCounts(msgspec.Struct, frozen=True, tag=True):
    pass


class GatewayReport(msgspec.Struct, frozen=True, tag=True):
    stats: GatewayStats


class Ping(msgspec.Struct, frozen=True, tag=True):
    pass
