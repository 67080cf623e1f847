"""What the scheduler knows, and the quantities that its rules are written in (derived in docs/scheduler.md)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qwengyre.buffer.groups import Group, GroupBuffer
from qwengyre.core.ids import GroupId
from qwengyre.scheduler.cells import Cell, Cells
from qwengyre.scheduler.commands import AnyTicketed
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.placement import Placement
from qwengyre.scheduler.training import StepState, Training


class State:
    """Counters and parts. Only `Scheduler` changes it; policies read it."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        """What is decided by: the run's config, with the last plan that was adopted."""
        self.plan: SchedulerConfig | None = None
        """The config of the last `Retuned` or `Reconfigured`, until the next publish."""
        self.cells = Cells(config.num_cells)
        self.placement = Placement()
        self.groups = GroupBuffer()
        self.training = Training()
        self.version = -1
        """The published version: steps done at the last publish; -1 before the run starts."""
        self.burst_end = 0
        """Steps done when the present burst is over."""
        self.num_bursts = 0
        """Begun: one with each publish, and one when a run that was done is made longer."""
        self.steps_done = 0
        self.durable_step = 0
        """Steps of the newest checkpoint that the core can be restored from."""
        self.epoch = 0
        """Rises whenever a cell is lost or comes back."""
        self.next_group = GroupId(0)
        self.num_train_groups = 0
        """Training groups dispatched."""
        self.expected: dict[int, float] = {}
        """Seconds that executions of training groups are expected to take, by number among them; 0 where nothing is known."""
        self.num_dispatched = 0
        """d(t): executions, evaluations included."""
        self.num_ended = 0
        """f(t)"""
        self.consumed: dict[int, list[Group]] = {}
        """Groups of the steps whose result is not durable, by step."""
        self.standalone_alive = [True] * config.num_standalone
        self.evaluations: dict[int, list[GroupId]] = {}
        """Groups of each evaluation that is under way or done, by version."""
        self.evaluation_left: dict[int, int] = {}
        """Groups of each evaluation that are not over."""
        self.awaited: dict[int, AnyTicketed] = {}
        """Commands without an answer yet, by ticket."""
        self.is_finished = False

    @property
    def waterlevel(self) -> int:
        """w(t) = d(t) - f(t): executions dispatched and not ended, the queue included."""
        return self.num_dispatched - self.num_ended

    @property
    def capacity(self) -> int:
        """C_R(t): slots of the servers that take executions now."""
        return self.placement.capacity

    @property
    def capacity_total(self) -> int:
        """Slots if every cell that lives were in rollout."""
        config = self.config
        return self.cells.num_alive * config.slots_per_cell + sum(self.standalone_alive) * config.slots_per_standalone

    def begin_burst(self, version: int) -> None:
        """`version` is published; decide by the last plan from now on."""
        if self.plan is not None:
            self.config, self.plan = self.plan, None
        self.version = version
        self.num_bursts += 1
        self.burst_end = self.config.burst_end(version)

    def reconfigure(self, changes: Mapping[str, int | float | bool]) -> None:
        """Take `steps` and evaluations at once, the rest with the next plan. Raises ValueError for values that contradict each other."""
        at_once = {
            name: value for name, value in changes.items() if name in ("steps", "evaluation_every_steps", "evaluate_at_end")
        }
        self.plan = msgspec.structs.replace(self.plan or self.config, **changes)
        self.config = msgspec.structs.replace(self.config, **at_once)

    def order_newest(self, num_groups: int) -> None:
        """Put the executions of the last `num_groups` training groups into `order` in the queue. They stay behind all earlier ones.

        What nothing is known of counts as long as the mean of the others.
        """
        if self.config.order == "dispatch" or not num_groups:
            return
        numbers = range(self.num_train_groups - num_groups, self.num_train_groups)
        known = [self.expected[number] for number in numbers if self.expected.get(number)]
        if known:
            mean, first = sum(known) / len(known), self.next_group - num_groups
            seconds = {first + index: self.expected.get(number) or mean for index, number in enumerate(numbers)}
            self.placement.sort_newest(num_groups * self.config.executions_per_group, lambda group: -seconds[group])

    def shorten_burst(self) -> None:
        """End the present burst where the last plan would, but not before the steps that are done. It never grows: its groups are out."""
        if self.plan is not None:
            self.burst_end = max(self.steps_done, min(self.burst_end, self.plan.burst_end(self.version)))

    @property
    def must_publish(self) -> bool:
        """The burst's last step is done and not yet published."""
        return self.version < self.steps_done == self.burst_end

    @property
    def num_steps_to_open(self) -> int:
        """Steps of this burst that can still be opened."""
        is_open = self.training.state not in (StepState.NONE, StepState.PUBLISHING)
        return self.burst_end - self.steps_done - is_open

    @property
    def has_data(self) -> bool:
        """A step that opened now would have something to take: any group that it may take when streaming, else a whole step's."""
        if self.config.streams:
            return self._may_take_beside(0)
        B = self.config.groups_per_step
        return self.groups.num_ready >= B and self._leaves_room(B, self.groups.newest_unready + 1)

    @property
    def may_take(self) -> bool:
        """The open step has room for one more group, and one is ready."""
        return self._may_take_beside(len(self.training.taken))

    def _may_take_beside(self, num_taken: int) -> bool:
        """Room is kept, in this step and the next, for older groups that are not ready and would exceed `max_staleness` later."""
        if num_taken >= self.config.groups_per_step or not self.groups.num_ready:
            return False
        return self.config.max_staleness is None or self._leaves_room(num_taken + 1, self.groups.oldest_ready)

    def _leaves_room(self, num_taken: int, version: int) -> bool:
        """Whether all unready groups older than `version` can be taken in time once this step has taken `num_taken`.

        One of version x is due in step x + D at the latest, so those up to x must fit into what the steps up to x + D have left.
        """
        cap, B, num = self.config.max_staleness, self.config.groups_per_step, 0
        if cap is None:
            return True
        for of_version, num_unready in self.groups.unready_before(version):
            num += num_unready
            if num > (max(0, of_version + cap - self.steps_done) + 1) * B - num_taken:
                return False
        return True

    @property
    def has_unclaimed_work(self) -> bool:
        """A cell that arrived in training now would find something to compute in this burst."""
        training = self.training
        if training.state is StepState.OPENING:
            return False  # the core claims first
        if training.state is StepState.OPEN and (len(training.queue) or self.may_take):
            return True
        return self.num_steps_to_open > 0 and self.has_data

    def slots(self, cells: list[Cell]) -> int:
        return len(cells) * self.config.slots_per_cell
