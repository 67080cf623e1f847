"""What the gateway and a cell's engine say to one another, over the wire of `rpc/`.

    client -> server   requests, each with its reply: Abort, ExportKV, ImportKV, Release
                       without a reply: Start (a call)
    server -> client   Status (first, and at least every HEARTBEAT_S), Chunks (of all calls of one turn), Failed

What only a cell may ask of its engine (weights, memory) does not pass here. Many calls share one connection, so a turn of the engine costs one frame, not one per call.
"""

from __future__ import annotations

import msgspec

from qwengyre.engines.api import Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.rpc.refusal import Refused

HEARTBEAT_S = 1.0  # half of what `runtime.heartbeat_s` is by default


class StartCall(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class ExportKV(msgspec.Struct, frozen=True, tag=True):
    token_ids: bytes


class Exported(msgspec.Struct, frozen=True, tag=True):
    handle: KVHandle | None


class ImportKV(msgspec.Struct, frozen=True, tag=True):
    handle: KVHandle


class Imported(msgspec.Struct, frozen=True, tag=True):
    num_tokens: int


class Release(msgspec.Struct, frozen=True, tag=True):
    handle_id: str


class Chunks(msgspec.Struct, frozen=True, tag=True):
    chunks: list[TokenChunk]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call ended with an error."""

    request_id: str
    refused: Refused


class Status(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity
    stats: EngineStats
