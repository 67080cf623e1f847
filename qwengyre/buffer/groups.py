"""The trajectory buffer's bookkeeping: which groups are out, which are ready, oldest policy version first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from qwengyre.core.errors import IllegalTransition
from qwengyre.core.ids import GroupId, MicroStepId


class Group:
    """A rollout group from its dispatch to the end of the step that trained on it."""

    __slots__ = ("group", "kind", "micro_steps", "num_left", "num_valid", "version")

    def __init__(self, group: GroupId, kind: Literal["train", "evaluation"], version: int, num_executions: int):
        self.group, self.kind, self.version = group, kind, version
        self.num_left = num_executions
        """Executions that have not ended."""
        self.micro_steps: tuple[MicroStepId, ...] = ()
        self.num_valid = 0


class GroupBuffer:
    """Groups that no durable step has consumed. Every operation is O(log groups).

    >>> buffer = GroupBuffer()
    >>> buffer.dispatch(GroupId(0), "train", version=0, num_executions=1)
    >>> buffer.end_execution(GroupId(0)).num_left
    0
    >>> buffer.set_ready(GroupId(0), ["m0"], num_valid=1)
    >>> buffer.num_ready, buffer.take().micro_steps
    (1, ('m0',))
    """

    def __init__(self) -> None:
        self._out: dict[GroupId, Group] = {}
        self._ready: list[tuple[int, GroupId]] = []
        self._ready_groups: dict[GroupId, Group] = {}
        self._unready: dict[int, int] = {}
        """Training groups that are out, by version."""

    @property
    def num_ready(self) -> int:
        """Groups that a step may take now."""
        return len(self._ready)

    @property
    def num_out(self) -> int:
        """Groups dispatched and not ready: their executions run, or their micro-steps are being cut."""
        return len(self._out)

    @property
    def oldest_ready(self) -> int:
        """Version of the group that `take` would hand out. Raises IndexError if none is ready."""
        return self._ready[0][0]

    @property
    def newest_unready(self) -> int:
        """The last version of which a training group is out; -1 if none is."""
        return max(self._unready, default=-1)

    def unready_before(self, version: int) -> list[tuple[int, int]]:
        """(version, training groups of it that are out), oldest first, of what is older than `version`. Few: versions in flight."""
        return sorted(item for item in self._unready.items() if item[0] < version)

    def unprepared(self) -> list[GroupId]:
        """Training groups whose executions have all ended and whose micro-steps are not known yet."""
        return [group.group for group in self._out.values() if group.num_left == 0]

    def dispatch(self, group: GroupId, kind: Literal["train", "evaluation"], *, version: int, num_executions: int) -> None:
        self._out[group] = Group(group, kind, version, num_executions)
        if kind == "train":
            self._unready[version] = self._unready.get(version, 0) + 1

    def end_execution(self, group: GroupId) -> Group:
        """Count one execution as ended; the group is complete when its `num_left` is 0."""
        entry = self._out[group]
        entry.num_left -= 1
        return entry

    def forget(self, group: GroupId) -> None:
        """Take out a complete group that will not be trained on: an evaluation."""
        del self._out[group]

    def set_ready(self, group: GroupId, micro_steps: Sequence[MicroStepId], *, num_valid: int) -> None:
        """Offer a complete group to training. Raises IllegalTransition if it is not complete, or was offered before."""
        entry = self._out.get(group)
        if entry is None or entry.num_left or entry.kind != "train":
            raise IllegalTransition(f"group {group}", "unknown or ready" if entry is None else "incomplete", "GroupReady")
        del self._out[group]
        self._unready[entry.version] -= 1
        if not self._unready[entry.version]:
            del self._unready[entry.version]
        entry.micro_steps, entry.num_valid = tuple(micro_steps), num_valid
        self.put_back(entry)

    def take(self) -> Group:
        """Hand out the ready group with the oldest policy version, the first dispatched of these."""
        _, group = heapq.heappop(self._ready)
        return self._ready_groups.pop(group)

    def put_back(self, group: Group) -> None:
        """Offer a group again: what was computed from it is lost."""
        heapq.heappush(self._ready, (group.version, group.group))
        self._ready_groups[group.group] = group
