"""Where a trainer computes, and in which numbers: its device, the dtype of its weights and that of its sums.

Arrays of the host come to the device by `put` alone. Every tensor says where it is made (`tests/arch/test_devices.py`).
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qwengyre.core.errors import ConfigError

HOST: Final = torch.device("cpu")


def device_of(name: str) -> torch.device:
    """`auto` is the first CUDA device of this process, or the processor when it has none. Raises ConfigError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return HOST
    if not torch.cuda.is_available():
        why = "torch is a build for CPUs" if torch.version.cuda is None else "torch finds none"
        raise ConfigError(
            f'"cuda" needs a CUDA device, and {why}: take "auto" or "cpu", or see `qwengyre doctor`', key="trainer.device"
        )
    return torch.device("cuda", torch.cuda.current_device())


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of sums over numbers of `dtype`: a gradient that is added up in bfloat16 stops growing after a few hundred terms (8 bits)."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def put(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array of the host on `device`. The host's memory on the host; on CUDA a copy that runs beside what the device computes.

    It leaves pinned memory on a stream of its own; what is computed from now on waits for it, and the host does not.
    """
    here = torch.from_numpy(np.ascontiguousarray(array))
    here = here if dtype is None else here.to(dtype)
    if device.type != "cuda":
        return here.to(device)
    copies, computes = _copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        there = here.pin_memory().to(device, non_blocking=True)
    computes.wait_stream(copies)
    there.record_stream(computes)
    return there


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
