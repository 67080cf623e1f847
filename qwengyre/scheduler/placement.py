"""Which server each live execution is on: slots, the queue of those not started, and the held.

Every operation costs O(log servers); moving a server's executions costs their number. Heaps are lazy: an entry counts only
while it still describes its server.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from qwengyre.core.errors import IllegalTransition
from qwengyre.core.ids import ExecutionId, GroupId, ServerId
from qwengyre.scheduler.commands import AnyCommand, Hold, Move, Route, Start

STANDALONE_RANK = 1 << 40
"""Standalone engines come after every cell: they serve longest."""


class Server:
    """Something that serves calls, as long as it is open."""

    __slots__ = ("executions", "is_listed", "is_open", "rank", "server", "slots", "stamp")

    def __init__(self, server: ServerId, slots: int, rank: int):
        self.server, self.slots, self.rank = server, slots, rank
        self.executions: dict[ExecutionId, None] = {}
        """In the order of arrival."""
        self.is_open = True
        self.is_listed = False
        """It has an entry in the list of servers with room."""
        self.stamp = 0


class Live:
    """A dispatched execution that has not ended: queued, on a server, or held."""

    __slots__ = ("attempt", "execution", "group", "server")

    def __init__(self, execution: ExecutionId, group: GroupId):
        self.execution, self.group = execution, group
        self.attempt = 0
        self.server: Server | None = None


class Placement:
    """Executions on servers."""

    def __init__(self) -> None:
        self.servers: dict[ServerId, Server] = {}
        self.live: dict[ExecutionId, Live] = {}
        self.queue: deque[Live] = deque()
        self.held: dict[ExecutionId, Live] = {}
        self.capacity = 0
        """C_R: slots of all open servers."""
        self._by_load: list[tuple[float, int, int, Server]] = []
        self._with_room: list[tuple[int, int, Server]] = []
        self._stamp = 0

    def open(self, server_id: ServerId, slots: int, rank: int) -> None:
        """Let a server take executions."""
        server = self.servers[server_id] = Server(server_id, slots, rank)
        self.capacity += slots
        self._changed(server)

    def add(self, execution: ExecutionId, group: GroupId) -> None:
        """Put a newly dispatched execution at the end of the queue."""
        live = self.live[execution] = Live(execution, group)
        self.queue.append(live)

    def sort_newest(self, num: int, rank: Callable[[GroupId], float]) -> None:
        """Sort the last `num` of the queue by the rank of their groups; equals keep their order."""
        newest = [self.queue.pop() for _ in range(num)]
        self.queue.extend(sorted(reversed(newest), key=lambda live: rank(live.group)))

    def end(self, execution: ExecutionId, attempt: int) -> Live | None:
        """Take an execution out; None if the attempt is an old one.

        Raises IllegalTransition if it already ended, was never dispatched, or is still queued.
        """
        live = self.live.get(execution)
        if live is None or (live.server is None and execution not in self.held):
            raise IllegalTransition(f"execution {execution}", "ended or unknown" if live is None else "queued", "an end")
        if attempt != live.attempt:
            return None
        self._leave_server(live)
        del self.live[execution]
        return live

    def restart(self, execution: ExecutionId, attempt: int) -> None:
        """Queue a lost execution again, before all others. Losing an old attempt, or a queued one, changes nothing."""
        live = self.live.get(execution)
        if live is None or attempt != live.attempt or (live.server is None and execution not in self.held):
            return
        self._leave_server(live)
        live.attempt += 1
        self.queue.appendleft(live)

    def place(self, out: list[AnyCommand]) -> None:
        """Give free slots to the held, then to the queue, first in first out, least loaded server first."""
        while self.held and (server := self._least_loaded()):
            execution = next(iter(self.held))
            self._enter(self.held.pop(execution), server)
            out.append(Route(execution, server.server))
        while self.queue and (server := self._least_loaded()):
            live = self.queue.popleft()
            self._enter(live, server)
            out.append(Start(live.execution, live.attempt, server.server))

    def hand_over(self, leaving: Sequence[ServerId], holds: list[AnyCommand] | None = None) -> dict[ServerId, tuple[Move, ...]]:
        """Close the cells that leave, all of them first, and reserve a slot for each of their executions.

        Destinations that serve longer come first: standalone engines, then the last cells. The waterlevel rule
        guarantees the room; a policy that pauses executions gives `holds`, which takes a `Hold` for each without room.
        """
        executions = {server: self._close(server) for server in leaving}
        moves: dict[ServerId, tuple[Move, ...]] = {}
        for server in leaving:
            found = [self._move(execution, holds) for execution in executions[server]]
            moves[server] = tuple(move for move in found if move is not None)
        return moves

    def _move(self, execution: ExecutionId, holds: list[AnyCommand] | None) -> Move | None:
        server = self._last_with_room()
        if server is None and holds is not None:
            self._hold(self.live[execution], holds)
            return None
        assert server is not None, f"no room for {execution}: the waterlevel rule was not kept"
        self._enter(self.live[execution], server)
        return Move(execution, server.server)

    def lose(self, server_id: ServerId, out: list[AnyCommand]) -> None:
        """Close a server that died: its executions go where there is room, or are held."""
        for execution in self._close(server_id):
            live = self.live[execution]
            if server := self._last_with_room():
                self._enter(live, server)
                out.append(Route(execution, server.server))
            else:
                self._hold(live, out)

    def _hold(self, live: Live, out: list[AnyCommand]) -> None:
        live.server = None
        self.held[live.execution] = live
        out.append(Hold(live.execution))

    def _close(self, server_id: ServerId) -> list[ExecutionId]:
        server = self.servers.pop(server_id, None)
        if server is None:
            return []
        server.is_open = False
        self.capacity -= server.slots
        executions = list(server.executions)
        server.executions.clear()
        return executions

    def _enter(self, live: Live, server: Server) -> None:
        server.executions[live.execution] = None
        live.server = server
        self._changed(server)

    def _leave_server(self, live: Live) -> None:
        if live.server is None:
            del self.held[live.execution]
            return
        del live.server.executions[live.execution]
        self._changed(live.server)
        live.server = None

    def _changed(self, server: Server) -> None:
        self._stamp += 1
        server.stamp = self._stamp
        num = len(server.executions)
        if num >= server.slots:
            return
        heapq.heappush(self._by_load, (num / server.slots, -server.rank, server.stamp, server))
        if not server.is_listed:
            server.is_listed = True
            heapq.heappush(self._with_room, (-server.rank, server.stamp, server))
        if len(self._by_load) > 64 + 4 * len(self.servers):
            self._by_load = [entry for entry in self._by_load if entry[3].is_open and entry[3].stamp == entry[2]]
            heapq.heapify(self._by_load)

    def _least_loaded(self) -> Server | None:
        while self._by_load:
            _, _, stamp, server = self._by_load[0]
            if server.is_open and server.stamp == stamp:
                return server
            heapq.heappop(self._by_load)
        return None

    def _last_with_room(self) -> Server | None:
        while self._with_room:
            server = self._with_room[0][2]
            if server.is_open and len(server.executions) < server.slots:
                return server
            heapq.heappop(self._with_room)
            server.is_listed = False
        return None
