"""Which keys and values the worker has read and no call has used up yet. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qwengyre.core.arrays import common_prefix
from qwengyre.engines.api import KVHandle


class NamedImport(NamedTuple):
    """What a request says in its `kv_transfer_params`."""

    import_id: str
    num_tokens: int


@dataclass
class _Held:
    token_ids: np.ndarray
    num_bytes: int
    waiting: int = 0
    """Calls that name this import and have not started: the worker must keep it for them."""
    is_used_up: bool = False


class Imports:
    """At most `max_bytes` of imports that nobody waits for, the oldest forgotten first.

    The call that takes all of an import uses it up: vLLM's own cache has it then. One that shares only its beginning does not.
    Every method that may end the need for an import returns the ids that the worker is to forget.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def add(self, handle: KVHandle, token_ids: np.ndarray) -> list[str]:
        """The newest stays, whatever its size."""
        self._held[handle.handle_id] = _Held(token_ids, handle.exposure.num_bytes)
        surplus = sum(held.num_bytes for held in self._held.values()) - self.max_bytes
        for held in list(self._held.values())[:-1]:
            if surplus > 0 and not held.is_used_up:
                held.is_used_up = True
                surplus -= held.num_bytes
        return self._sweep()

    def has(self, import_id: str) -> bool:
        return import_id in self._held

    def name_longest(self, token_ids: np.ndarray) -> NamedImport | None:
        """The import that knows most of `token_ids`, kept until `started` or `given_up`."""
        best = NamedImport("", 0)
        for import_id, held in self._held.items():
            common = common_prefix(held.token_ids, token_ids)
            if common > best.num_tokens and not held.is_used_up:
                best = NamedImport(import_id, common)
        if not best.num_tokens:
            return None
        self._held[best.import_id].waiting += 1
        return best

    def started(self, named: NamedImport) -> list[str]:
        """vLLM has put the import into the call's blocks."""
        if held := self._held.get(named.import_id):
            held.is_used_up |= named.num_tokens >= len(held.token_ids) - 1
        return self.given_up(named)

    def given_up(self, named: NamedImport) -> list[str]:
        """The call will never start."""
        if held := self._held.get(named.import_id):
            held.waiting -= 1
        return self._sweep()

    def clear(self) -> None:
        """The worker has forgotten everything."""
        self._held.clear()

    def _sweep(self) -> list[str]:
        over = [import_id for import_id, held in self._held.items() if held.is_used_up and held.waiting <= 0]
        for import_id in over:
            del self._held[import_id]
        return over
