"""What the runtime itself needs to know: where things are, how long to wait, what to keep."""

from __future__ import annotations

from typing import Literal

import msgspec


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = "run"
    """Name of the run; the run folder is `<runs dir>/<name>-<date>`."""
    seed: int = 0
    """Fixes tasks, sampling of tokens and of trajectories."""
    launcher: Literal["local"] = "local"
    """How cells are started. `local`: a supervisor of processes on this machine."""
    threads_per_cell: int = 1
    """CPU threads that torch may use in one cell."""
    start_timeout_s: float = 120.0
    """Longest wait for a cell or the gateway to come up."""
    operation_timeout_s: float = 120.0
    """Longest wait for one control operation of a cell (a role switch, a snapshot, a checkpoint)."""
    compute_timeout_s: float = 600.0
    """Longest wait for one micro-step."""
    collective_timeout_s: float = 30.0
    """Longest wait of a member for the others in one collective."""
    heartbeat_s: float = 2.0
    """How often a cell must answer; three misses in a row and it is lost."""
    restart_lost_cells: bool = True
    """Start a lost cell again; it comes back in the rollout role."""
    max_concurrent_harnesses: int = 64
    """Most harness processes at once on this machine."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""
    audit_logprobs: bool = True
    """At the end, compare every trained log-prob with a trainer forward under the version that sampled it."""
    permute_rewards: bool = False
    """Control experiment: shuffle rewards inside each group, so that nothing can be learned."""

    def __post_init__(self) -> None:
        for key in ("threads_per_cell", "max_concurrent_harnesses", "keep_checkpoints"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("start_timeout_s", "operation_timeout_s", "compute_timeout_s", "collective_timeout_s", "heartbeat_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be above 0")
