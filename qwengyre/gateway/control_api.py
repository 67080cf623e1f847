"""The control API's bodies. The runtime imports this; it needs nothing of the gateway's shell.

    POST   /control/executions             OpenExecution -> OpenedExecution   may call from now on; held until it has a route
    POST   /control/executions/{id}/close  -> ClosedExecution                 keys die, running calls are cut, the records come back
    POST   /control/servers                AddServer                          again with another address: calls go on there
    DELETE /control/servers/{server}                                          calls that are routed there are held
    POST   /control/routes                 {execution: server or null}        null holds
    POST   /control/move                   Move -> Moved                hold, carry KV, route, go on
    GET    /control/stats                  -> GatewayReport
    POST   /control/shutdown

Bodies are msgpack (`application/msgpack`) or JSON (any other content type); the answer comes in the same. Errors are
`{"error": sentence}` with status 400 (a wrong body), 404 (an unknown execution), 409 (an older attempt).
"""

from __future__ import annotations

import msgspec

from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.stats import GatewayStats, SessionCounts
from qwengyre.trajectory.records import CallEvent


class OpenExecution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class OpenedExecution(msgspec.Struct, frozen=True):
    key: str
    """For `OPENAI_API_KEY` and the like."""
    path: str
    """`/e/<token>/v1`, to be put behind scheme, host and port. Without `/v1` for Anthropic clients."""


class AddServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerId
    address: str
    """`tcp://HOST:PORT` or `unix:PATH` of an EngineServer."""
    token: bytes = b""
    """What that server asks for. In JSON: base64."""


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: ServerId
    moves: dict[ExecutionId, ServerId | None]
    deadline_s: float = 60.0
    """KV that is not at its destination by then is computed again there: an engine that hangs does not hold up the move."""


class Moved(msgspec.Struct, frozen=True):
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


class ClosedExecution(msgspec.Struct, frozen=True):
    execution: ExecutionId
    attempt: int
    events: list[CallEvent]
    """What `trajectory` builds the tree from."""
    counts: SessionCounts


class GatewayReport(msgspec.Struct, frozen=True):
    stats: GatewayStats
    executions: dict[ExecutionId, int]
    """Live calls of each open execution."""
    routes: dict[ExecutionId, ServerId | None]
    servers: list[ServerId]
