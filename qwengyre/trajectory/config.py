"""Settings of the trajectory processor and of packing: the run file's table `[trajectory]`."""

from __future__ import annotations

import msgspec

from qwengyre.core.ids import LocalPath


class TrajectoryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    j_max: int = 5
    """Most trajectories chosen of one execution; 0 sets no cap (in the paper 5 trains like no cap)."""
    divide_by_std: bool | None = None
    """Divide an execution's advantage by the standard deviation of its group's rewards. Unset: as `trainer.objective` was published."""
    keep_zero_advantage: bool = False
    """Choose trajectories for executions of advantage 0 too: needed when the objective has a KL term."""
    micro_step_tokens: int = 8192
    """Executions of one group are merged into one micro-step up to this many distinct tokens; 0 never merges."""
    merge_min_shared_share: float = 0.0
    """Merge only where the shared prompt is at least this share of the execution to be added; 0 merges whatever fits."""
    harness_rules: LocalPath = LocalPath("")
    """TOML file with `[[harness]]` tables that tell the roles of a harness that is not built in (docs/harnesses.md)."""

    def __post_init__(self) -> None:
        if self.j_max < 0:
            raise ValueError(f"j_max must be at least 1, or 0 for no cap; it is {self.j_max}")
        if not 0 <= self.merge_min_shared_share <= 1:
            raise ValueError(f"merge_min_shared_share must lie between 0 and 1; it is {self.merge_min_shared_share}")
        if self.micro_step_tokens < 0:
            raise ValueError(f"micro_step_tokens must not be negative; it is {self.micro_step_tokens}")

    @property
    def max_trajectories(self) -> int | None:
        """J_max, None for no cap."""
        return self.j_max or None
