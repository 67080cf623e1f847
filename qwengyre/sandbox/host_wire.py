"""What a harness host can be asked by its controller: a request, and its reply. The runtime imports this.

    RunHarness      -> HarnessOver   when the harness's sandbox is empty: its outcome if it is over, None if it waits to be scored
    ScoreWorkspace  -> HarnessOver   its outcome, once its calls are known to be over
    StopExecution   -> Done          everything of it ends
    Look            -> HostReport    this process runs, and how many executions it has

They go over the wire of `rpc/`, on a Unix socket of the run's private folder. Refused with SandboxError (no space left), HarnessLost
for an execution that this host does not have, or what went wrong.
"""

from __future__ import annotations

import msgspec

from qwengyre.core.records import Outcome
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress


class HostSpec(msgspec.Struct, frozen=True):
    """Everything that a host needs to start; readable by its owner only."""

    harness: HarnessConfig
    gateways: tuple[GatewayAddress, ...]
    work: str
    """Folder of its own for workspaces of live executions."""
    kept: str
    """Folder for workspaces that are kept to be looked at."""
    socket: str
    """Where it takes requests."""
    ready_file: str
    """Written when it does."""


class RunHarness(msgspec.Struct, frozen=True, tag=True):
    spec: ExecutionSpec


class ScoreWorkspace(msgspec.Struct, frozen=True, tag=True):
    execution: str
    attempt: int
    num_calls: int
    """That its harness made of the model."""


class HarnessOver(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome | None


class StopExecution(msgspec.Struct, frozen=True, tag=True):
    execution: str
    attempt: int


class Look(msgspec.Struct, frozen=True, tag=True):
    pass


class HostReport(msgspec.Struct, frozen=True, tag=True):
    num_running: int
