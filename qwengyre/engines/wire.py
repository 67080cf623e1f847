"""What the gateway and a cell's engine say to one another, over the wire of `rpc/`.

    client -> server   requests, each with its reply: Abort, Pause, Resume, UpdateWeights, ExportKV, ImportKV, Release, Offload, Restore
                       without a reply: Start (a call)
    server -> client   Status (first, and at least every HEARTBEAT_S), Chunks (of all calls of one turn), Failed

Many calls share one connection, so a turn of the engine costs one frame, not one per call.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.engines.api import Capabilities, Capacity, EngineStats, GenerateRequest, KVHandle, TokenChunk
from qwengyre.rpc.refusal import Refused
from qwengyre.transfer.api import Exposure

HEARTBEAT_S = 1.0


class Start(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Pause(msgspec.Struct, frozen=True, tag=True):
    mode: Literal["keep", "abort"]


class Resume(msgspec.Struct, frozen=True, tag=True):
    pass


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    snapshot: Exposure
    version: int


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


class Offload(msgspec.Struct, frozen=True, tag=True):
    pass


class Restore(msgspec.Struct, frozen=True, tag=True):
    snapshot: Exposure
    version: int


class Chunks(msgspec.Struct, frozen=True, tag=True):
    chunks: list[TokenChunk]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A call ended with an error."""

    request_id: str
    refused: Refused


class Status(msgspec.Struct, frozen=True, tag=True):
    capacity: Capacity
    stats: EngineStats
    capabilities: Capabilities
