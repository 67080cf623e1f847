"""Host memory in which imported keys and values wait for their call. Fresh memory costs as much as the copy into it; this is kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class Staging:
    """Buffers that are taken and given back; at most `max_idle` stay when nobody uses them.

    >>> staging = Staging()
    >>> arrays, buffer = staging.take({"a": (2, 3), "b": (1, 4)})
    >>> {name: array.shape for name, array in arrays.items()}, buffer.nbytes >= 10
    ({'a': (2, 3), 'b': (1, 4)}, True)
    >>> staging.give(buffer)
    >>> staging.take({"c": (5, 2)})[1] is buffer
    True
    """

    def __init__(self, max_idle: int = 4):
        self.max_idle = max_idle
        self._idle: list[np.ndarray] = []

    def take(self, shapes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """uint8 arrays of these shapes side by side, and the buffer to give back."""
        sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
        buffer = self._buffer(sum(sizes.values()))
        arrays, at = {}, 0
        for name, size in sizes.items():
            arrays[name] = buffer[at : at + size].reshape(shapes[name])
            at += size
        return arrays, buffer

    def give(self, buffer: np.ndarray) -> None:
        self._idle.append(buffer)
        self._idle.sort(key=lambda idle: idle.nbytes, reverse=True)
        del self._idle[self.max_idle :]

    def clear(self) -> None:
        self._idle.clear()

    def _buffer(self, num_bytes: int) -> np.ndarray:
        fitting = [index for index, idle in enumerate(self._idle) if idle.nbytes >= num_bytes]
        return self._idle.pop(fitting[-1]) if fitting else np.empty(num_bytes, np.uint8)
