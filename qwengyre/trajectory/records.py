"""What is recorded of the calls of an execution: the records of the gateway's journal, from which the tree is built.

    Opened                                        one attempt of one execution may call
    CallStarted, TokensSampled ..., CallFinished  one call; concurrent calls are interleaved
    Closed                                        no call comes after it

Only new tokens are in them: a call names the call it extends and how many tokens of that call's sequence (prompt and output) it shares.
They are arrays, and small on purpose: tokens are most of a journal (8 bytes for a sampled one, 4 for context). `session` numbers the
attempts in the order of opening, `call` the calls of an attempt in the order of arrival.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from qwengyre.core.ids import CallId, ExecutionId, ServerId


class RoleHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the request says about the role of its context; `trajectory.roles` decides."""

    dialect: str
    """`chat`, `messages` or `responses`."""
    headers: dict[str, str] = {}
    """Only the headers that a harness rule names, lower case."""
    system_digest: str = ""
    """Digest of the canonical system prompt, volatile parts removed."""
    num_tools: int = 0
    markers: tuple[str, ...] = ()
    """Names of the harness rules whose text marker this request contains."""
    quotes: CallId | None = None
    """An earlier call whose output reappears in the head of this fresh context (that call was a summary)."""
    replays: CallId | None = None
    """The latest earlier call whose answer stands as an assistant message here, though no prefix is shared with its sequence."""
    returns: tuple[CallId, ...] = ()
    """Earlier calls whose answer, one without a tool call, stands in a tool result that is new here."""


CallEnd = Literal["stop", "length", "abort", "error"]


class BranchCause(StrEnum):
    """Why a call's context is where it is in the tree."""

    ROOT = "root"
    EXTENDS = "extends"
    """The context is the base's sequence plus new messages."""
    DIVERGES = "diverges"
    """The history was changed by the harness: shares a prefix only."""
    RERENDERED = "rerendered"
    """The template cannot extend the sampled tokens: rendered anew, shares what is equal."""
    RETRY = "retry"
    """The same context was asked again: a sibling of the first answer."""


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


class CallStarted(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """A request of the harness was accepted."""

    session: int
    call: int
    base: int
    """The call whose sequence this one shares a prefix with; -1 hangs from the root."""
    base_tokens: int
    """How many leading tokens of the base's sequence are shared. 0 without a base."""
    context_ids: bytes
    """int32, the prompt tokens after the shared prefix. Template glue and harness text: context, never trained."""
    cause: BranchCause
    hints: RoleHints
    at: float
    """Seconds since 1970."""
    key: bytes
    """Chain key of the context (`trajectory.match`)."""
    ordinal: int
    """How many times this context had been asked for a new answer before."""
    first_index: int
    """Tokens of this answer that its base had sampled: > 0 when it continues an abandoned one."""
    dialect: str
    stops: tuple[str, ...] = ()
    call_limit: str = "any"
    """How many tool calls the client wanted: `gateway.protocol.request.CallLimit`."""


class TokensSampled(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """`S` tokens, all by one policy version."""

    session: int
    call: int
    token_ids: bytes
    """int32 (S,)"""
    logprobs: bytes
    """float32 (S,)"""
    version: int
    server: ServerId


class TokensRouted(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """To which experts of a mixture `T` tokens of the call's sequence went when the engine computed them."""

    session: int
    call: int
    first: int
    num_tokens: int
    routes: bytes
    """uint8 (T, B)"""


class CallFinished(msgspec.Struct, frozen=True, tag="e", array_like=True):
    session: int
    call: int
    reason: CallEnd
    num_sampled: int
    cached_tokens: int
    abandoned: bool
    """The client never got the terminal event (disconnect): recorded, a sibling, not trained unless it was extended."""
    at: float
    num_moves: int = 0
    held_s: float = 0.0
    detail: str = ""
    num_seen: int = 0
    """Tokens of the whole answer that the client was shown, and that a later context goes on after."""
    rest: str = ""
    """What the client was shown after these: the part of a token that a stop string cut in two."""
    num_masked: int = 0
    """Last tokens of the whole answer that came with or after its stop string: no harness saw them, so they are never trained, never
    context."""


CallRecord = CallStarted | TokensSampled | TokensRouted | CallFinished
GatewayRecord = Opened | CallRecord | Closed
