"""The `[sandbox]` table of a run file: which kind of sandbox runs an execution, and what each kind is told."""

from __future__ import annotations

from typing import Literal

from qwengyre.images.config import SandboxConfig
from qwengyre.sandbox.harbor.config import HarborConfig


class SandboxTable(SandboxConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What runs executions and scores them."""

    kind: Literal["own", "harbor"] = "own"
    """`own`: the command of [harness], by bubblewrap on this machine's programs or on an image. `harbor`: an agent of Harbor's in one of its
    environments, as [sandbox.harbor] says; of [harness] its timeouts, `evaluator_tries` and what is kept hold for that, too."""
    harbor: HarborConfig = HarborConfig()
    """Trials of Harbor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "harbor":
            return
        for name in ("python", "agent"):
            if not getattr(self.harbor, name):
                raise ValueError(f'kind = "harbor" needs {name} in [sandbox.harbor]')
        for name, why in (
            ("image", "a task of Harbor's names its own"),
            ("host_programs", "its environments have their own"),
            ("hosts", "its trial host runs them"),
        ):
            if getattr(self, name):
                raise ValueError(f'kind = "harbor" and {name} contradict each other: {why}; leave one out')
