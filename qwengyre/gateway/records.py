"""What the gateway journals. Small on purpose: tokens are most of it (8 bytes for a sampled one, 4 for context).

`session` numbers an (execution, attempt) in the order of opening, `call` numbers the calls of a session. The records that
other folders see (`trajectory.records`) are made from these.
"""

from __future__ import annotations

import msgspec

from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.trajectory.records import RoleHints


class Opened(msgspec.Struct, frozen=True, tag="o", array_like=True):
    """An execution may call from now on. Keys are derived, never written."""

    session: int
    execution: ExecutionId
    attempt: int
    seed: int
    temperature: float
    trainable: bool
    max_context_tokens: int
    max_tokens_per_call: int
    model: str


class Closed(msgspec.Struct, frozen=True, tag="c", array_like=True):
    session: int


class Asked(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """A call was accepted."""

    session: int
    call: int
    base: int
    """-1 hangs from the root."""
    base_tokens: int
    context_ids: bytes
    cause: str
    hints: RoleHints
    at: float
    key: bytes
    """Chain key of the context (`trajectory.match`)."""
    ordinal: int
    """How many times this context had been asked for a new answer before."""
    first_index: int
    """Tokens of this answer that calls before had sampled: > 0 when it goes on with an abandoned one."""
    dialect: str
    stops: tuple[str, ...] = ()
    calls: str = "any"
    """How many tool calls the client wanted: `protocol.request.Calls`."""


class Sampled(msgspec.Struct, frozen=True, tag="s", array_like=True):
    session: int
    call: int
    token_ids: bytes
    logprobs: bytes
    version: int
    server: ServerId


class Ended(msgspec.Struct, frozen=True, tag="e", array_like=True):
    session: int
    call: int
    reason: str
    num_sampled: int
    cached_tokens: int
    abandoned: bool
    at: float
    num_moves: int
    held_s: float
    detail: str
    num_seen: int
    """Tokens of the whole answer that the client was shown, and that a later context goes on after."""
    rest: str = ""
    """What the client was shown after these: the part of a token that a stop string cut in two."""
    num_masked: int = 0
    """Last tokens of the whole answer that came with or after its stop string."""


GatewayRecord = Opened | Closed | Asked | Sampled | Ended
