"""The one place where token arrays become bytes and come back. Little-endian, as journals and records store them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOKEN: np.dtype = np.dtype("<i4")
LOGPROB: np.dtype = np.dtype("<f4")
VERSION: np.dtype = np.dtype("<i4")
FLAG: np.dtype = np.dtype("?")


def pack(values: Sequence[float] | np.ndarray, dtype: np.dtype) -> bytes:
    """
    >>> unpack(pack([1, 2, 3], TOKEN), TOKEN).tolist()
    [1, 2, 3]
    """
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def unpack(data: bytes | bytearray, dtype: np.dtype) -> np.ndarray:
    """A read-only view of `data`; copy before writing."""
    return np.frombuffer(data, dtype=dtype)


def common_prefix(a_T: np.ndarray, b_T: np.ndarray) -> int:
    """Number of leading tokens that two arrays share.

    Compares blocks of growing size, so that an early difference in long arrays stays cheap.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    num_tokens, done, block = min(len(a_T), len(b_T)), 0, 64
    while done < num_tokens:
        end = min(done + block, num_tokens)
        differs = a_T[done:end] != b_T[done:end]
        if differs.any():
            return done + int(differs.argmax())
        done, block = end, block * 4
    return num_tokens
