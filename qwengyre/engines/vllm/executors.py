"""vLLM's executors, in processes that do not outlive the cell: it starts them itself, not by `rpc`."""

from __future__ import annotations

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from qwengyre.rpc.tether import end_with_parent


class InCore(UniProcExecutor):
    """One device: the worker in the process of vLLM's engine core."""

    def _init_executor(self) -> None:
        end_with_parent(os.getppid())
        super()._init_executor()


class InProcesses(MultiprocExecutor):
    """A worker for each device, children of the engine core; `worker.py` ties them to it."""

    def _init_executor(self) -> None:
        end_with_parent(os.getppid())
        super()._init_executor()
