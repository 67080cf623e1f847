"""What members sum over: gloo through the host's memory, or NCCL between their devices. `members.py` knows no kinds.

NCCL takes one communicator's ranks on devices of their own. So the members of a prefix tell each other, in the store that asks for the
secret, where their sums lie, and take NCCL if no two of them share a device and none is on its host. **NCCL has not been run: no GPU was
at hand.** Proofs and confirmations go over gloo in any case.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has these names, too, but not in its types

from qwengyre.models.placement import HOST

GLOO: Final[Any] = dist.ProcessGroupGloo
"""torch's types leave out most of what it can do."""
POLL_S: Final = 0.001
"""Between two looks at a sum of a device, which takes milliseconds and more."""


class Sums(Protocol):
    """One prefix of a membership, as one of its ranks sees it."""

    def scratch(self, gradient: Tensor) -> Tensor:
        """A copy of own sums, where they are summed."""
        ...

    def reduce(self, scratch: Tensor) -> None:
        """Add up at rank 0, in place. Raises RuntimeError when a member does not take part within the deadline."""
        ...

    def abort(self) -> None:
        """Peers that still wait get an error at once or at their deadline."""
        ...


class GlooSums:
    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def scratch(self, gradient: Tensor) -> Tensor:
        return gradient.to(HOST, copy=True)

    def reduce(self, scratch: Tensor) -> None:
        self._group.reduce([scratch], _to_the_first(self._timeout_s)).wait()

    def abort(self) -> None:
        """The group is its membership's, which ends it."""


class NcclSums:
    """Ends itself at the deadline: torch's own watchdog would end the process, and own sums with it."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout_s: float, device: torch.device) -> None:
        """The ranks find each other here, while the store is open: torch would leave that to their first sum."""
        os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        made: Any = vars(dist)["ProcessGroupNCCL"]  # of builds for CUDA alone
        options = made.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group, self._timeout_s = made(store, rank, size, options), timeout_s
        self._wait(self._group.allreduce([torch.zeros(1, device=device)]))

    def scratch(self, gradient: Tensor) -> Tensor:
        return gradient.clone()

    def reduce(self, scratch: Tensor) -> None:
        self._wait(self._group.reduce([scratch], _to_the_first(self._timeout_s)))

    def abort(self) -> None:
        self._group.abort()

    def _wait(self, work: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError(f"the sum over devices did not end within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()


def place_of(device: torch.device) -> str:
    """A name that no other device of any host has; empty on a host."""
    return "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def sums_over(places: Sequence[str]) -> str:
    """Of members whose sums lie there.

    >>> sums_over(["a", "b"]), sums_over(["a", "a"]), sums_over(["a", ""])
    ('nccl', 'gloo', 'gloo')
    """
    return "nccl" if all(places) and len(set(places)) == len(places) else "gloo"


def _to_the_first(timeout_s: float) -> Any:
    options: Any = c10d.ReduceOptions()
    options.reduceOp, options.rootRank = dist.ReduceOp.SUM, 0
    options.timeout = timedelta(seconds=timeout_s)
    return options
