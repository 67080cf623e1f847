"""Which keys and values the worker has read and no call has used yet. Pure."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from qwengyre.engines.api import KVHandle


class Imports:
    """At most `max_bytes` of imports, the oldest forgotten first; a call uses an import up, for vLLM's own cache then has it."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, tuple[np.ndarray, int]] = OrderedDict()

    def add(self, handle: KVHandle, token_ids: np.ndarray) -> list[str]:
        """Remember an import; return those that have to go for it. The newest stays, whatever its size."""
        self._held[handle.handle_id] = token_ids, handle.exposure.num_bytes
        surplus = []
        while len(self._held) > 1 and sum(size for _, size in self._held.values()) > self.max_bytes:
            surplus.append(self._held.popitem(last=False)[0])
        return surplus

    def has(self, import_id: str) -> bool:
        return import_id in self._held

    def drop(self, import_id: str) -> bool:
        return self._held.pop(import_id, None) is not None

    def clear(self) -> None:
        self._held.clear()

    def longest(self, token_ids: np.ndarray) -> dict[str, object] | None:
        """The import that knows most of `token_ids`, as a request names it in its `kv_transfer_params`."""
        best, best_id = 0, ""
        for import_id, (known, _) in self._held.items():
            size = min(len(known), len(token_ids))
            differs = np.flatnonzero(known[:size] != token_ids[:size])
            common = int(differs[0]) if len(differs) else size
            if common > best:
                best, best_id = common, import_id
        return {"import_id": best_id, "num_tokens": best} if best else None
