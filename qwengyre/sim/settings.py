"""What is compared: a policy with its settings, turned into the scheduler's own config and a pool of servers."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from qwengyre.core.ids import ServerId, is_standalone
from qwengyre.scheduler.config import OrderName, SchedulerConfig
from qwengyre.scheduler.traits import TRAITS, PolicyName
from qwengyre.sim.workload import Workload


class Variant(NamedTuple):
    """A policy of the scheduler with what a comparison adds to it."""

    policy: PolicyName
    streaming: bool = False
    is_one_cell: bool = False
    """All nodes that switch are one cell."""
    has_standalone: bool = False
    """Some nodes never switch, and there must be some."""

    pauses: bool = False
    """The pool trains whatever still runs (`rivals.Toggle`)."""

    @property
    def is_split(self) -> bool:
        """Nodes that never switch make the comparison, so their number is searched."""
        return self.has_standalone or not TRAITS[self.policy].switches


VARIANTS: Final[dict[str, Variant]] = {
    "elastic": Variant("elastic", streaming=True),
    "async": Variant("async"),
    "async-streaming": Variant("async", streaming=True),
    "colocate": Variant("colocate", is_one_cell=True),
    "colocate-standalone": Variant("colocate", is_one_cell=True, has_standalone=True),
    "colocate-standalone-streaming": Variant("colocate", streaming=True, is_one_cell=True, has_standalone=True),
}
POLICY_NAMES: Final = tuple(VARIANTS)
"""What is compared unless one is named."""
VARIANTS["toggle"] = Variant("colocate", is_one_cell=True, pauses=True)
VARIANTS["toggle-standalone"] = Variant("colocate", is_one_cell=True, has_standalone=True, pauses=True)
OURS: Final = "elastic"
"""What the others are compared with."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a workload. Unset fields are the workload's."""

    policy: str = OURS
    """One of VARIANTS."""
    steps_per_burst: int | None = None
    dispatch_depth: float | None = None
    cell_nodes: int | None = None
    training_nodes: int = 0
    """Of a fixed split: nodes that always train."""
    standalone_nodes: int = 0
    """Nodes that only ever roll out."""
    two_way: bool = False
    backlog: float = 0.0
    """With `two_way`: steps' worth of executions that may wait for a slot after a publish."""
    order: OrderName = "dispatch"
    """Who starts first of those that a publish dispatches; the other one needs the workload's `foresight_error`."""
    leave_only_for_work: bool = True
    max_staleness: int | None = None
    """Hard cap on the staleness of a group."""
    tune: bool = False
    """Elastic plans mu, phi, two_way and backlog again as it goes, within `max_staleness`."""

    def __post_init__(self) -> None:
        if self.policy not in VARIANTS:
            raise ValueError(f"policy {self.policy!r} is not one of {', '.join(VARIANTS)}")

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.policy]


class Pool(msgspec.Struct, frozen=True):
    """Sizes behind a scheduler config."""

    cell_nodes: int
    standalone_nodes: int
    """Of the one standalone engine, 0 if there is none."""
    pauses: bool = False
    """The pool trains whatever still runs on it."""

    def nodes(self, server: ServerId) -> int:
        return self.standalone_nodes if is_standalone(server) else self.cell_nodes

    def num_replicas(self, workload: Workload) -> int:
        """Data-parallel replicas in a cell: one of more nodes than the workload's gains nothing by its name."""
        return max(1, self.cell_nodes // workload.cell_nodes)


def build(workload: Workload, setting: Setting) -> tuple[SchedulerConfig, Pool]:
    """Lay the pool out for a setting. Raises ValueError, saying what to change, if it does not fit the nodes."""
    variant, standalone = setting.variant, setting.standalone_nodes
    if variant.has_standalone and not standalone:
        raise ValueError(f"{setting.policy} needs standalone_nodes above 0")
    switching = workload.nodes - standalone
    if switching < 1:
        raise ValueError(f"standalone_nodes = {standalone} must be below the {workload.nodes} nodes of the pool")
    cell_nodes = switching if variant.is_one_cell else setting.cell_nodes or workload.cell_nodes
    if cell_nodes < 1 or switching % cell_nodes:
        raise ValueError(f"cells of {cell_nodes} nodes do not divide the {switching} nodes that switch roles: change cell_nodes")
    is_fixed = not TRAITS[variant.policy].switches
    if is_fixed and (setting.training_nodes % cell_nodes or not 0 < setting.training_nodes < workload.nodes):
        raise ValueError(
            f"training_nodes = {setting.training_nodes} must be a multiple of {cell_nodes} nodes, above 0 and below {workload.nodes}"
        )
    if variant.pauses and (setting.steps_per_burst or workload.steps_per_burst) > 1:
        raise ValueError(
            f"{setting.policy} returns to rollout at a publish only, and what it paused would never end before: "
            "set steps_per_burst = 1 of the workload"
        )
    if setting.order != "dispatch" and workload.foresight_error is None:
        raise ValueError(
            f'order = "{setting.order}" needs to know how long groups will take: set foresight_error of the workload, '
            f"{workload.sigma_execution / workload.executions_per_group**0.5:.2g} if each task has one earlier group"
        )
    mu, phi = setting.steps_per_burst, setting.dispatch_depth
    config = SchedulerConfig(
        policy=variant.policy,
        num_cells=switching // cell_nodes,
        slots_per_cell=workload.slots(cell_nodes),
        num_standalone=1 if standalone else 0,
        slots_per_standalone=max(1, workload.slots(standalone)),
        training_cells=max(1, setting.training_nodes // cell_nodes),
        streaming=variant.streaming,
        steps=workload.steps,
        groups_per_step=workload.groups_per_step,
        executions_per_group=workload.executions_per_group,
        steps_per_burst=workload.steps_per_burst if mu is None else mu,
        dispatch_depth=workload.dispatch_depth if phi is None else phi,
        two_way=setting.two_way,
        backlog=setting.backlog if TRAITS[variant.policy].leaves_one_by_one else 0.0,
        order=setting.order,
        leave_only_for_work=setting.leave_only_for_work,
        max_staleness=setting.max_staleness,
        tune=setting.tune and TRAITS[variant.policy].leaves_one_by_one,
    )
    return config, Pool(cell_nodes, standalone, variant.pauses)
