"""Every call of an execution, as the tree is built from it. The gateway makes these records of its journal (`gateway/records.py`).

One call is `CallStarted`, then any number of `TokensSampled`, then one `CallFinished`. Only new tokens are in them: a call
names the call it extends and how much of that call's row (prompt and output) it shares.
"""

from __future__ import annotations

from enum import Enum
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
    tools_digest: str = ""
    num_tools: int = 0
    markers: tuple[str, ...] = ()
    """Names of the harness rules whose text marker this request contains."""
    quotes: CallId | None = None
    """An earlier call whose output reappears in the head of this fresh context (that call was a summary)."""
    replays: CallId | None = None
    """The latest earlier call whose answer stands as an assistant message here, though no prefix is shared with its row."""
    returns: tuple[CallId, ...] = ()
    """Earlier calls whose answer, one without a tool call, stands in a tool result that is new here."""


class BranchCause(Enum):
    """Why a call's context is where it is in the tree."""

    ROOT = "root"
    EXTENDS = "extends"
    """The context is the base's row plus new messages."""
    DIVERGES = "diverges"
    """The history was changed by the harness: shares a prefix only."""
    RERENDERED = "rerendered"
    """The template cannot extend the sampled tokens: rendered anew, shares what is equal."""
    RETRY = "retry"
    """The same context was asked again: a sibling of the first answer."""


class CallStarted(msgspec.Struct, frozen=True, tag=True):
    execution: ExecutionId
    call: CallId
    base: CallId | None
    """The call whose row this one shares a prefix with; None hangs from the root."""
    base_tokens: int
    """How many leading tokens of the base's row are shared. 0 when base is None."""
    context_ids: bytes
    """int32, the prompt tokens after the shared prefix. Template glue and harness text: context, never trained."""
    cause: BranchCause
    hints: RoleHints
    temperature: float
    trainable: bool
    """False for T = 0 and for grammar-constrained calls."""
    at: float


class TokensSampled(msgspec.Struct, frozen=True, tag=True):
    """`S` tokens, all by one policy version."""

    call: CallId
    token_ids: bytes
    """int32 (S,)"""
    logprobs: bytes
    """float32 (S,)"""
    version: int
    server: ServerId


class CallFinished(msgspec.Struct, frozen=True, tag=True):
    call: CallId
    reason: Literal["stop", "length", "abort", "error"]
    num_sampled: int
    cached_tokens: int
    abandoned: bool
    """The client never got the terminal event (disconnect): recorded, a sibling, not trained unless it was extended."""
    at: float
    num_moves: int = 0
    held_s: float = 0.0
    detail: str = ""
    num_masked: int = 0
    """Last sampled tokens that the harness never saw because a stop string came before them: never trained, never context."""


CallEvent = CallStarted | TokensSampled | CallFinished
