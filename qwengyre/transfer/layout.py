"""How named arrays lie in one block of memory: aligned regions, in the order given. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qwengyre.core.errors import TransferError
from qwengyre.transfer.api import Exposure, Pieces, Region

ALIGNMENT = 64


def lay_out(arrays: Mapping[str, Pieces]) -> tuple[tuple[Region, ...], int]:
    """Place `arrays` one after the other; return their regions and the number of bytes of the whole.

    >>> regions, num_bytes = lay_out({"a": np.zeros(3, np.float32), "b": [np.zeros((2, 2), np.int64), np.zeros((1, 2), np.int64)]})
    >>> [(region.name, region.offset, region.num_bytes, region.shape) for region in regions], num_bytes
    ([('a', 0, 12, (3,)), ('b', 64, 48, (3, 2))], 112)
    """
    regions, offset = [], 0
    for name, value in arrays.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        dtype, shape = _dtype_and_shape(pieces_of(value))
        num_bytes = sum(piece.nbytes for piece in pieces_of(value))
        regions.append(Region(name, offset, num_bytes, dtype, shape))
        offset += num_bytes
    return tuple(regions), offset


def pieces_of(value: Pieces) -> list[np.ndarray]:
    return value if isinstance(value, list) else [value]


def placeholders(exposure: Exposure) -> dict[str, np.ndarray]:
    """Arrays of the shapes and dtypes of the regions, without memory of their own."""
    return {region.name: np.broadcast_to(np.empty((), region.dtype), region.shape) for region in exposure.regions}


def views(regions: tuple[Region, ...], memory: memoryview) -> dict[str, np.ndarray]:
    """The arrays that `regions` describe inside `memory`, without a copy."""
    return {
        region.name: np.frombuffer(memory, np.dtype(region.dtype), _count(region), region.offset).reshape(region.shape)
        for region in regions
    }


def destinations(exposure: Exposure, into: Mapping[str, Pieces] | None) -> dict[Region, Pieces]:
    """Where each region to be read goes: to what `into` says, or to new arrays for all regions.

    Raises TransferError when `into` names an unknown region or disagrees in dtype, shape or contiguity.
    """
    if into is None:
        return {region: np.empty(region.shape, np.dtype(region.dtype)) for region in exposure.regions}
    known = {region.name: region for region in exposure.regions}
    targets = {}
    for name, value in into.items():
        region = known.get(name)
        if region is None:
            raise TransferError(f"the exposure at {exposure.location} has no region {name!r}")
        dtype, shape = _dtype_and_shape(pieces_of(value))
        if shape != tuple(region.shape) or np.dtype(dtype) != np.dtype(region.dtype):
            raise TransferError(f"region {name!r} is {region.dtype}{list(region.shape)}, the destination {dtype}{list(shape)}")
        if not all(piece.flags.c_contiguous and piece.flags.writeable for piece in pieces_of(value)):
            raise TransferError(f"the destination of region {name!r} must be contiguous and writable")
        targets[region] = value
    return targets


def whole_arrays(targets: Mapping[Region, Pieces]) -> dict[str, np.ndarray]:
    """By name, what lies in one array each."""
    return {region.name: value for region, value in targets.items() if isinstance(value, np.ndarray)}


def _dtype_and_shape(pieces: list[np.ndarray]) -> tuple[str, tuple[int, ...]]:
    """Of all pieces together. Raises TransferError when they do not fit one another."""
    first = pieces[0]
    if len(pieces) == 1:
        return first.dtype.str, first.shape
    if any(piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:] for piece in pieces):
        raise TransferError("pieces of one region must agree in dtype and in all axes but the first")
    return first.dtype.str, (sum(len(piece) for piece in pieces), *first.shape[1:])


def copy_pieces(target: np.ndarray, value: Pieces) -> None:
    """Fill `target` with the pieces, one after the other."""
    start = 0
    for piece in pieces_of(value):
        if target.ndim:
            np.copyto(target[start : start + len(piece)], piece)
            start += len(piece)
        else:
            np.copyto(target, piece)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, for I/O calls; writes go to the array."""
    return array.reshape(-1).view(np.uint8).data


def _count(region: Region) -> int:
    return region.num_bytes // np.dtype(region.dtype).itemsize
