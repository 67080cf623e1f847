"""The `[hooks]` table of a run file: which functions of the user's own take the place of a rule."""

from __future__ import annotations

import math

import msgspec

from qwengyre.core.ids import LocalPath


class HooksConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Functions of your own, each as `module:name` (docs/hooks.md)."""

    folder: LocalPath = LocalPath("")
    """Where their modules are looked for first. Unset: the folder of the run file."""
    reward: str = ""
    """Makes the reward of an execution of its workspace, its score and what was said."""
    reward_in_evaluations: bool = False
    """Use `reward` for the executions of evaluations, too; else their reward is the score of the task."""
    group_filter: str = ""
    """Says whether a rollout group is trained at all."""
    advantage: str = ""
    """Makes the advantages of a rollout group of its rewards, in place of the group's mean."""
    choice: str = ""
    """Chooses the trajectories of an execution, in place of the draw by trainable tokens."""
    token_loss: str = ""
    """The loss of each trained token, in place of that of `trainer.objective`, whose clipping range and aggregation stay."""
    callbacks: tuple[str, ...] = ()
    """Classes whose methods are called after steps, publishes, evaluations and executions, and at the end."""
    threads: int = 8
    """Most calls of hooks that the controller runs at once."""
    timeout_s: float = 300.0
    """Longest that one call of a hook in the controller may take; then the run stops and names it."""

    @property
    def are_wanted(self) -> bool:
        """Whether any module is to be imported."""
        return any((self.reward, self.group_filter, self.advantage, self.choice, self.token_loss, self.callbacks))

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be above 0, not {self.timeout_s}")
        if self.reward_in_evaluations and not self.reward:
            raise ValueError("reward_in_evaluations has no effect without hooks.reward: set that, or leave this out")
        if len(set(self.callbacks)) < len(self.callbacks):
            raise ValueError("callbacks has a class twice: name each once")
