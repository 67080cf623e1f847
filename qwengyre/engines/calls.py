"""The calls of an engine, and the pass that gives each of them its next tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qwengyre.engines.api import Sampling
from qwengyre.engines.passes import Pass
from qwengyre.engines.sampler import DRAWS, uniforms


@dataclass(slots=True, eq=False)
class Call:
    """One running or waiting request. Known are `tokens[:size]`; keys and values lie in `blocks` for the first `computed`."""

    request_id: str
    sampling: Sampling
    tokens: np.ndarray
    """int32, prompt then output, allocated to the largest size that it may reach."""
    size: int
    num_prompt: int
    last_size: int
    """Size at which the call ends with "length"."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    is_new: bool = True
    """Never admitted yet."""
    cached: int = 0
    recompute: int = 0
    """Tokens below this index had been computed before a publish."""
    sent: int = 0
    """Output tokens already in chunks."""
    logprobs: list[float] = field(default_factory=list)
    """Of output tokens not sent yet."""
    draws: list[float] = field(default_factory=list)
    draws_block: int = -1
    first_routed: int = 0
    num_routed: int = 0
    routes: bytearray = field(default_factory=bytearray)
    """Experts of tokens not sent yet."""

    def note_routes(self, start: int, routes_NB: np.ndarray) -> None:
        """Of tokens `start` and on: computed again they are not told again."""
        known = self.first_routed + self.num_routed
        if start > known:  # some of them were found in the cache meanwhile
            self.first_routed, self.num_routed, self.routes = start, 0, bytearray()
            known = start
        fresh = routes_NB[known - start :]
        self.routes += fresh.tobytes()
        self.num_routed += len(fresh)

    def take_routes(self) -> tuple[int, int, bytes]:
        found = self.first_routed, self.num_routed, bytes(self.routes)
        self.first_routed, self.num_routed, self.routes = self.first_routed + self.num_routed, 0, bytearray()
        return found

    def draw(self) -> float:
        """The random number of the next token, keyed by (seed, token index)."""
        block, at = divmod(self.sampling.first_index + self.size - self.num_prompt, DRAWS)
        if block != self.draws_block:
            self.draws, self.draws_block = uniforms(self.sampling.seed, block), block
        return self.draws[at]


@dataclass(slots=True)
class PromptPiece:
    """`length` known tokens of a call from `start` on, to be computed in one pass."""

    call: Call
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.call.size


@dataclass(slots=True)
class Counts:
    """Cumulative; `engines.api.EngineStats` says what each is."""

    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_recomputed_at_publish: int = 0
    tokens_imported: int = 0


def make_pass(decoding: list[Call], pieces: list[PromptPiece], table_RB: np.ndarray) -> Pass:
    """One token of each decoding call, then the pieces. Each call's blocks are row `slot` of `table_RB`."""
    token_ids = [call.tokens[call.size - 1] for call in decoding]
    positions = [call.size - 1 for call in decoding]
    slots = [call.slot for call in decoding]
    wanted, calls = list(range(len(decoding))), list(decoding)
    for piece in pieces:
        end = piece.start + piece.length
        token_ids += piece.call.tokens[piece.start : end].tolist()
        positions += range(piece.start, end)
        slots += [piece.call.slot] * piece.length
        if piece.is_last:
            wanted.append(len(token_ids) - 1)
            calls.append(piece.call)
    return Pass(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        wanted=np.array(wanted, np.int64),
        table_RB=table_RB,
        temperatures=[call.sampling.temperature for call in calls],
        draws=[call.draw() for call in calls],
        num_decoding=len(decoding),
        pieces=[(piece.call.slot, piece.start, piece.length) for piece in pieces],
    )
