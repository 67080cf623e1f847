"""What a run showed so far, as the scheduler heard of it: how long executions, micro-steps, steps and switches took.

Fed with each event and what was decided on it: live, out of a journal, or on the virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.ids import ExecutionId, GroupId, MicroStepId, group_of
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.durations import Durations, MeasuredDurations
from qwengyre.sim.workload import Workload

ANSWERED: Final = (
    cmd.Drain, cmd.SwitchToTraining, cmd.ReturnToRollout, cmd.OpenStep, cmd.CloseStep, cmd.RunOptimizer, cmd.Publish
)  # fmt: skip
MIN_EXECUTION_S: Final = 1e-3
MIN_MICRO_STEP_S: Final = 1e-6
"""A journal's clock may give two events one time; the simulator divides by durations."""


class MeasuredGroup(msgspec.Struct, frozen=True):
    """A group of a real run."""

    durations_s: tuple[float, ...]
    """Of its executions, without the time that their calls were held, where that is known."""
    micro_steps_s: tuple[float, ...]


class MeasuredRun(msgspec.Struct, frozen=True):
    """Durations of one real run, on the workload that it was. A source of durations for the simulator."""

    workload: Workload
    groups: tuple[MeasuredGroup, ...]

    def with_workload(self, workload: Workload) -> MeasuredRun:
        return MeasuredRun(workload, self.groups)

    def durations(self, seed: int) -> Durations:
        """Seed 0: group by group as it was. Any other seed draws groups with replacement."""
        num = self.workload.num_groups
        in_order = np.arange(num) % len(self.groups)
        index_G = in_order if seed == 0 else np.random.default_rng(seed).integers(len(self.groups), size=num)
        chosen = [self.groups[index] for index in index_G]
        N = self.workload.executions_per_group
        unloaded_GN = np.array([[group.durations_s[i % len(group.durations_s)] for i in range(N)] for group in chosen])
        durations = MeasuredDurations(unloaded_GN, [group.micro_steps_s for group in chosen])
        error = self.workload.foresight_error
        if error is not None:
            errors_G = np.random.default_rng((seed, num)).normal(0.0, error, num)
            durations.expected_G = np.exp(np.log(unloaded_GN).mean(axis=1) + errors_G)
        return durations


class History:
    """Grows by a few numbers for each execution and micro-step."""

    def __init__(self) -> None:
        self.kinds: dict[GroupId, str] = {}
        self.members: dict[GroupId, list[ExecutionId]] = {}
        """Executions that were started, by group; groups in the order of dispatch."""
        self.started: dict[ExecutionId, tuple[int, float]] = {}
        """Last attempt of each execution, and when it started."""
        self.lived: dict[ExecutionId, tuple[int, float]] = {}
        """Attempt and seconds of each execution that ended."""
        self.expected: dict[int, float] = {}
        """Seconds that was foreseen of executions, by number among the training groups; none of what nothing was known."""
        self.micro_steps: dict[GroupId, tuple[MicroStepId, ...]] = {}
        self.computed: dict[MicroStepId, float] = {}
        """Seconds from claim to answer."""
        self.waits: dict[type, list[float]] = {kind: [] for kind in ANSWERED}
        self.num_moves = 0
        self._pending: dict[int, tuple[cmd.Ticketed, float]] = {}

    def see(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        self.happened(event)
        for command in commands:
            self.decided(command, event.at)

    def begin_life(self) -> None:
        """A new controller: nobody answers what the one before asked."""
        self._pending.clear()

    def decided(self, command: cmd.Command, at: float) -> None:
        match command:
            case cmd.Dispatch():
                self.kinds[command.group] = command.kind
            case cmd.Start():
                if command.execution not in self.started:
                    self.members.setdefault(group_of(command.execution), []).append(command.execution)
                self.started[command.execution] = command.attempt, at
            case cmd.Drain():
                self.num_moves += len(command.moves)
        if isinstance(command, cmd.Ticketed):
            self._pending[command.ticket] = command, at

    def happened(self, event: ev.Event) -> None:
        match event:
            case ev.ExecutionEnded():
                attempt, start = self.started.get(event.execution, (-1, 0.0))
                if attempt == event.attempt:
                    self.lived[event.execution] = attempt, event.at - start
            case ev.GroupReady():
                self.micro_steps[event.group] = event.micro_steps
            case ev.Foreseen():
                foreseen = enumerate(event.seconds, start=event.first)
                self.expected.update((number, seconds) for number, seconds in foreseen if seconds)
        if not isinstance(event, ev.TicketedAnswer) or event.ticket not in self._pending:
            return
        command, asked = self._pending.pop(event.ticket)
        if isinstance(command, cmd.Compute):
            self.computed[command.micro_step] = event.at - asked
        elif type(command) in self.waits:
            self.waits[type(command)].append(event.at - asked)

    def trained_groups(self) -> Iterator[tuple[GroupId, tuple[MicroStepId, ...]]]:
        """Training groups of which every micro-step was computed, in the order of dispatch."""
        for group, micro_steps in sorted(self.micro_steps.items()):
            is_computed = all(name in self.computed for name in micro_steps)
            if self.kinds.get(group) == "train" and is_computed and any(name in self.lived for name in self.members[group]):
                yield group, micro_steps

    def foresight_errors(self, groups: Collection[GroupId]) -> list[float]:
        """Of those of `groups` that something was foreseen of and whose executions have all ended: log of what they took, as a

        geometric mean, over what was foreseen.
        """
        found = []
        trained = (group for group, kind in self.kinds.items() if kind == "train")
        for number, group in enumerate(trained):
            members = self.members.get(group, ())
            if group in groups and number in self.expected and members and all(name in self.lived for name in members):
                logs = [math.log(max(MIN_EXECUTION_S, self.lived[name][1])) for name in members]
                found.append(sum(logs) / len(logs) - math.log(self.expected[number]))
        return found

    def workload(
        self, config: SchedulerConfig, groups: Sequence[MeasuredGroup], *, move_stall_s: float = 0.0, decode_share: float = 0.0
    ) -> Workload:
        """The workload that these groups are of. One node a cell: the run's cells are the only unit that its events tell."""
        durations_s = np.array([seconds for group in groups for seconds in group.durations_s])
        work_s = np.mean([sum(group.micro_steps_s) for group in groups]) * config.groups_per_step
        standalone = round(config.num_standalone * config.slots_per_standalone / config.slots_per_cell)
        return Workload(
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            executions_per_group=config.executions_per_group,
            steps_per_burst=config.steps_per_burst,
            dispatch_depth=config.dispatch_depth,
            nodes=config.num_cells + standalone,
            cell_nodes=1,
            slots_per_node=config.slots_per_cell,
            median_h=float(np.median(durations_s)) / 3600,
            sigma_query=float(np.std([np.mean(np.log(group.durations_s)) for group in groups])),
            sigma_execution=float(np.mean([np.std(np.log(group.durations_s)) for group in groups])),
            overall_timeout_h=float(durations_s.max()) / 3600 * 10,
            train_node_hours_per_step=float(work_s) / 3600,
            train_share_by_duration=0.0,
            micro_steps_per_group=max(1, round(float(np.mean([len(group.micro_steps_s) for group in groups])))),
            optimizer_s=self._mean_wait(cmd.OpenStep, cmd.CloseStep, cmd.RunOptimizer),
            publish_s=self._mean_wait(cmd.Publish),
            to_training_s=self._mean_wait(cmd.Drain, cmd.SwitchToTraining),
            to_rollout_s=self._mean_wait(cmd.ReturnToRollout),
            move_stall_s=move_stall_s,
            decode_share=decode_share,
        )

    def _mean_wait(self, *kinds: type) -> float:
        return sum(float(np.mean(self.waits[kind])) for kind in kinds if self.waits[kind])
