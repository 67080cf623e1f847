"""The `[scheduler]` table of a run file."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from qwengyre.scheduler.traits import TRAITS, PolicyName, Traits

OrderName = Literal["dispatch", "longest-first"]


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides. Defaults are those of the paper's smallest setting; symbols in brackets are the paper's."""

    policy: PolicyName = "elastic"
    """`elastic`: cells leave one by one. `colocate`: all cells switch together. `async`: a fixed split."""
    num_cells: int = 3
    """Cells [K]; cell 0 is the core."""
    slots_per_cell: int = 16
    """Executions that one cell serves at once [C_e]."""
    num_standalone: int = 0
    """Engines that only ever do rollout."""
    slots_per_standalone: int = 16
    """Executions that one standalone engine serves at once."""
    training_cells: int = 1
    """`async` only: cells 0 .. n-1 always train, the others never do."""
    streaming: bool | None = None
    """Train on groups as they get ready, instead of on whole steps. Unset: yes for `elastic`, else no."""
    steps: int = 10
    """Optimizer steps of the run [S]. 0 trains nothing: the first version is evaluated, as `qwengyre evaluate` does."""
    groups_per_step: int = 8
    """Rollout groups that one step consumes [B]."""
    executions_per_group: int = 8
    """Executions of each query [N]."""
    steps_per_burst: int = 2
    """Steps between two publishes [mu]."""
    dispatch_depth: float = 0.5
    """How many steps' worth of groups run ahead of a burst [phi]; Q_b = (phi + mu) * B."""
    two_way: bool = False
    """At a boundary give back only as many cells as w and the coming dispatch need, instead of all of them."""
    backlog: float = 0.0
    """With `two_way`: steps' worth of executions that may wait for a slot after a publish [beta], so that rollout cells stay full.

    0 returns every cell that would shorten the queue. A deeper backlog saves idle slots and makes executions start later, so it
    suits dispatch depths at which groups are ready before they are due. `qwengyre plan` finds it.
    """
    order: OrderName = "dispatch"
    """Who of those that a publish dispatches starts first, where slots are too few.

    `longest-first` goes by how long the earlier executions of each task took. It changes when executions start, never which are
    dispatched or trained. It lets a deeper backlog wait: the long ones do not.
    """
    leave_only_for_work: bool = True
    """A satellite leaves only if unclaimed work exists."""
    max_staleness: int | None = None
    """Hard cap [D] on the scheduling staleness of a group: a step keeps room for the groups that may not wait for the next one.

    Unset: the dispatch depth is a soft cap, as in the paper. Needs dispatch_depth + steps_per_burst <= max_staleness + 1.
    """
    evaluation_every_steps: int = 0
    """Evaluate at the first boundary after every n steps; 0: never in between. In a run file `evaluation.every_steps` says it."""
    evaluate_at_start: bool = False
    """Evaluate version 0. In a run file `evaluation.at_start` says it."""
    evaluate_at_end: bool = False
    """Evaluate the last version. In a run file `evaluation.at_end` says it."""
    evaluation_group_sizes: tuple[int, ...] = ()
    """Executions of each group of one evaluation, in the order of dispatch: `[4, 4, 1, 1]` is two sampled, two greedy queries.

    In a run file it follows from `evaluation.samples`, `evaluation.greedy` and the held-out tasks.
    """

    tune: bool = False
    """Plan `steps_per_burst`, `dispatch_depth`, `two_way`, `backlog` and `order` again after every step, from what the run has measured.

    Elastic only. The values of the run file are where it starts. Needs `max_staleness`, which no plan goes beyond.
    """

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_cells", "slots_per_cell", "groups_per_step", "executions_per_group", "steps_per_burst")
        _at_least(self, 1, "slots_per_standalone")
        _at_least(self, 0, "steps", "num_standalone", "dispatch_depth", "backlog", "evaluation_every_steps")
        if not math.isfinite(self.dispatch_depth):
            raise ValueError("dispatch_depth must be a number: how many steps' worth of groups run ahead")
        if not math.isfinite(self.backlog):
            raise ValueError("backlog must be a number: how many steps' worth of executions may wait for a slot")
        if self.backlog and not (self.two_way and self.traits.leaves_one_by_one):
            raise ValueError(
                f"backlog = {self.backlog:g} has no effect without two_way = true under elastic scheduling: set two_way, or backlog = 0"
            )
        if self.tune and not self.traits.leaves_one_by_one:
            raise ValueError(f"tune = true is for elastic scheduling, and policy = {self.policy!r} is not: leave tune out")
        if self.tune and self.max_staleness is None:
            raise ValueError("tune = true needs max_staleness, the staleness in steps that no plan may go beyond: set it")
        depth = self.dispatch_depth + self.steps_per_burst
        if self.max_staleness is not None and depth > self.max_staleness + 1:
            raise ValueError(
                f"max_staleness = {self.max_staleness} cannot be kept with {depth:g} steps dispatched ahead: "
                f"lower dispatch_depth + steps_per_burst to at most {self.max_staleness + 1}, or raise max_staleness"
            )
        if not self.traits.switches:
            _at_least(self, 1, "training_cells")
            if self.training_cells >= self.num_cells + (self.num_standalone > 0):
                raise ValueError(
                    f"training_cells = {self.training_cells} of num_cells = {self.num_cells} leaves nothing to roll out: "
                    "lower training_cells or add standalone engines"
                )
        wants_evaluation = self.evaluation_every_steps or self.evaluate_at_start or self.evaluate_at_end
        if wants_evaluation and not self.evaluation_group_sizes:
            raise ValueError(
                "evaluation_group_sizes is empty, so there is nothing to evaluate: set it, or switch evaluations off"
            )
        if any(size < 1 for size in self.evaluation_group_sizes):
            raise ValueError("evaluation_group_sizes: every group needs at least 1 execution")

    @property
    def traits(self) -> Traits:
        """What the policy does."""
        return TRAITS[self.policy]

    @property
    def streams(self) -> bool:
        return self.traits.streams if self.streaming is None else self.streaming

    @property
    def wants_foresight(self) -> bool:
        """Before a publish the driver says what is known of the next groups: to order by it, or to find out how good it is."""
        return self.order != "dispatch" or self.tune

    def num_groups_due(self, version: int) -> int:
        """Training groups dispatched in all once `version` is published: min(S*B, (v + phi + mu) * B)."""
        depth = math.floor((version + self.dispatch_depth + self.steps_per_burst) * self.groups_per_step + 1e-9)
        return min(self.steps * self.groups_per_step, depth)

    @property
    def num_may_wait(self) -> int:
        """Executions that may wait for a slot when a publish decides who stays in training: floor(beta * B * N)."""
        return math.floor(self.backlog * self.groups_per_step * self.executions_per_group + 1e-9)

    def burst_end(self, version: int) -> int:
        """Steps done when the burst that began at `version` is over."""
        return min(self.steps, version + self.steps_per_burst)


def _at_least(config: SchedulerConfig, least: int, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} = {getattr(config, name)} is too small: at least {least}")
