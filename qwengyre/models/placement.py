"""Where an engine or a trainer computes, and in which numbers: its device, the dtype of its weights and that of its sums.

Arrays of the host come to a device by `put` alone, and back by `fetch`. Every tensor says where it is made (`tests/arch/test_devices.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.core.errors import ConfigError

HOST: Final = torch.device("cpu")


def device_of(name: str, key: str = "trainer.device") -> torch.device:
    """`auto` is the first CUDA device of this process, or the processor when it has none. Raises ConfigError, which names `key`."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return HOST
    if not torch.cuda.is_available():
        why = "torch is a build for CPUs" if torch.version.cuda is None else "torch finds none"
        raise ConfigError(f'"cuda" needs a CUDA device, and {why}: take "auto" or "cpu", or see `qwengyre doctor`', key=key)
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


def fetch(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copies on the host of tensors of one device: all on their way to pinned memory at once, one wait for all of them."""
    if not tensors or tensors[0].device.type != "cuda":
        return [tensor.to(HOST).numpy() for tensor in tensors]
    here = [torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True) for tensor in tensors]
    for to, tensor in zip(here, tensors, strict=True):
        to.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [to.numpy() for to in here]


def host_array(shape: Sequence[int], dtype: np.dtype | type, device: torch.device) -> np.ndarray:
    """Memory of the host whose content is unknown, pinned when it is on its way to CUDA."""
    if device.type != "cuda" or not np.prod(shape):
        return np.empty(shape, dtype)
    like = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(*shape, dtype=like, device=HOST, pin_memory=True).numpy()


def place(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`; parameters that are one stay one."""
    if all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
