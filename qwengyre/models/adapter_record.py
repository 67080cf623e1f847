"""What a snapshot of adapters says beside them, and what they change. Imports no torch by itself: a controller reads checkpoints, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

ADAPTER: Final = "qwengyre.adapter"
"""Name of an `Adapter`'s bytes beside the weights of a snapshot, and in the metadata of a file of weights."""


class Adapter(msgspec.Struct, frozen=True):
    """What beside A and B says how they change a weight."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def packed(self) -> np.ndarray:
        """uint8, to lie beside weights."""
        return np.frombuffer(msgspec.msgpack.encode(self), np.uint8)


def adapter_in(arrays: Mapping[str, np.ndarray]) -> Adapter | None:
    """How the adapters that were published change weights; None: whole weights were published."""
    packed = arrays.get(ADAPTER)
    return None if packed is None else msgspec.msgpack.decode(packed.tobytes(), type=Adapter)


class Base:
    """The weights that adapters change, once for each cell: its trainer shares them with its engine, else a folder is read when asked for."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._arrays: Mapping[str, np.ndarray] | None = None

    def share(self, arrays: Mapping[str, np.ndarray]) -> None:
        """float32, by the names that parameters have in memory; nobody changes them from now on."""
        self._arrays = arrays

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Raises ConfigError."""
        if self._arrays is None:
            import torch

            from qwengyre.models.load import as_in_memory

            self._arrays = as_in_memory(self._model_dir, torch.float32)
        return self._arrays
