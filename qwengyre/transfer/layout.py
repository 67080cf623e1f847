"""How named arrays lie in one block of memory: aligned regions, in the order given. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qwengyre.core.errors import TransferError
from qwengyre.transfer.api import Exposure, Region

ALIGNMENT = 64


def lay_out(arrays: Mapping[str, np.ndarray]) -> tuple[tuple[Region, ...], int]:
    """Place `arrays` one after the other; return their regions and the number of bytes of the whole.

    >>> regions, num_bytes = lay_out({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.int64)})
    >>> [(region.name, region.offset, region.num_bytes) for region in regions], num_bytes
    ([('a', 0, 12), ('b', 64, 32)], 96)
    """
    regions, offset = [], 0
    for name, array in arrays.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        regions.append(Region(name, offset, array.nbytes, array.dtype.str, array.shape))
        offset += array.nbytes
    return tuple(regions), offset


def views(regions: tuple[Region, ...], memory: memoryview) -> dict[str, np.ndarray]:
    """The arrays that `regions` describe inside `memory`, without a copy."""
    return {
        region.name: np.frombuffer(memory, np.dtype(region.dtype), _count(region), region.offset).reshape(region.shape)
        for region in regions
    }


def destinations(exposure: Exposure, into: dict[str, np.ndarray] | None) -> dict[Region, np.ndarray]:
    """The array that each region to be read goes to: those of `into`, or new ones for all regions.

    Raises TransferError when `into` names an unknown region or disagrees in dtype, shape or contiguity.
    """
    if into is None:
        return {region: np.empty(region.shape, np.dtype(region.dtype)) for region in exposure.regions}
    known = {region.name: region for region in exposure.regions}
    targets = {}
    for name, array in into.items():
        region = known.get(name)
        if region is None:
            raise TransferError(f"the exposure at {exposure.location} has no region {name!r}")
        if array.shape != tuple(region.shape) or array.dtype != np.dtype(region.dtype):
            raise TransferError(
                f"region {name!r} is {region.dtype}{list(region.shape)}, the destination {array.dtype.str}{list(array.shape)}"
            )
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise TransferError(f"the destination of region {name!r} must be contiguous and writable")
        targets[region] = array
    return targets


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, for I/O calls; writes go to the array."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _count(region: Region) -> int:
    return region.num_bytes // np.dtype(region.dtype).itemsize
