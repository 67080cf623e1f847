"""Cells on the nodes of a Ray cluster: Ray places them, watches nodes and actors, and ends them. Nothing else goes through Ray.

A cell is a placement group of one bundle, and an actor in it (`CellHost`) whose child is the cell's process; with
`ray.ranks_per_node` the ranks that do not fit there have a bundle and an actor each. A node that dies takes its actor along, and
`wait_end` says so. Whoever is declared dead while it still runs is fenced by the cell's incarnation.
Needs the extra `ray`; run folder and policy must lie where every node finds them under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from qwengyre.cell.cell import CellAddress, CellSpec
from qwengyre.config.installation import to_have
from qwengyre.core.errors import ConfigError, NoRoom, ProcessFailed
from qwengyre.launchers.cell_host import CellHost, HostReply, Joined, ServingRank
from qwengyre.launchers.config import RayConfig, Reservation
from qwengyre.rpc.processes import process_failed
from qwengyre.rpc.refusal import Refused, rebuild

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)
END_DEADLINE_S = 20.0  # to stop an actor in an orderly way; then it is killed
CONNECT_S = 5.0  # one TCP connection inside a cluster
NUM_WAITERS = 64
"""Ray's own calls block: each waits in a thread."""
Result = TypeVar("Result")


class Up(NamedTuple):
    """A cell that serves."""

    address: CellAddress
    nodes: list[str]
    """Ray's ids of the nodes of its hosts."""


class RayLife:
    """`hosts`: the actor of the cell's process first, then those of ranks on other nodes. The first that ends is the end."""

    def __init__(self, up: Up, hosts: list[ActorHandle], group: PlacementGroup, launcher: RayLauncher) -> None:
        self.address, self.nodes = up.address, up.nodes
        self._hosts, self._group, self._launcher = hosts, group, launcher
        self._ended = [asyncio.wrap_future(host.wait_end.remote().future()) for host in hosts]
        for ended in self._ended:
            ended.add_done_callback(_retrieve)

    async def wait_end(self) -> str:
        from ray.exceptions import RayActorError

        await asyncio.wait(self._ended, return_when=asyncio.FIRST_COMPLETED)
        ended, node = next((ended, node) for ended, node in zip(self._ended, self.nodes, strict=True) if ended.done())
        try:
            return str(ended.result())
        except RayActorError as error:
            return f"Ray lost it on node {node[:8]}: {str(error).strip().splitlines()[0]}"

    def kill(self) -> None:
        self._launcher.end(self._hosts, self._group)

    async def stop(self) -> None:
        from ray.exceptions import RayActorError

        try:
            await asyncio.wait_for(self._hosts[0].stop.remote(), END_DEADLINE_S)
        except (RayActorError, TimeoutError) as error:
            log.warning("cell_did_not_stop", extra={"node": self.nodes[0], "reason": str(error) or "deadline passed"})
        self.kill()


def _retrieve(ended: asyncio.Future[Any]) -> None:
    """Nobody need ask how a cell ended that was killed: asyncio would report its exception as never retrieved."""
    if not ended.cancelled():
        ended.exception()


class RayLauncher:
    """Joins a cluster, or makes one on this machine. `logs` gets one file for each name, written on the cell's node."""

    def __init__(self, config: RayConfig, logs: Path, start_timeout_s: float) -> None:
        self._config, self._logs, self._start_timeout_s = config, logs, start_timeout_s
        self._threads = ThreadPoolExecutor(NUM_WAITERS, thread_name_prefix="ray")
        self._is_ours = False

    async def open(self) -> RayLauncher:
        """Raises ConfigError without Ray, or when the cluster does not answer."""
        self._is_ours = join_cluster(self._config.address, key="ray.address")
        return self

    async def launch(self, name: str, spec: CellSpec) -> RayLife:
        from ray.exceptions import RayError

        log_path = self._logs / f"{name}.log"
        room = self._config.cell if spec.has_trainer else self._config.standalone
        shares = self._config.shares(spec.trainer.ranks) if spec.has_trainer else [range(1)]
        spec = msgspec.structs.replace(spec, ranks_here=len(shares[0]))
        try:
            group = await self._reserve(name, spec, room, len(shares))
            hosts = [self._host_in(group, room, index) for index in range(len(shares))]
        except RayError as error:
            raise process_failed(name, f"Ray does not place it: {error}", log_path) from error
        try:
            async with asyncio.timeout(2 * self._start_timeout_s):
                launched = await self._start(name, spec, hosts, shares)
        except (RayError, TimeoutError) as error:
            self.end(hosts, group)
            raise process_failed(name, f"its node or its actor is gone: {error or 'no answer'}", log_path) from error
        except (ProcessFailed, asyncio.CancelledError):
            self.end(hosts, group)
            raise
        log.info(
            "cell_placed",
            extra={"cell": name, "incarnation": spec.incarnation, "nodes": launched.nodes, "host": launched.address.control},
        )
        return RayLife(launched, hosts, group, self)

    async def _start(self, name: str, spec: CellSpec, hosts: list[ActorHandle], shares: list[range]) -> Up:
        """The cell's process and, when it says where they meet, its ranks on other nodes. Raises what the first host that fails says."""
        wanted = msgspec.msgpack.encode(spec)

        async def join() -> list[bytes]:
            at = await hosts[0].ranks_address.remote(name)
            asked = [host.join.remote(name, wanted, list(ranks), at) for host, ranks in zip(hosts, shares, strict=True)][1:]
            return [await reply for reply in asked]

        async def launch() -> list[bytes]:
            return [await hosts[0].launch.remote(name, wanted)]

        steps = [asyncio.create_task(launch())] + ([asyncio.create_task(join())] if len(hosts) > 1 else [])
        try:
            replies: list[HostReply] = []
            for step in asyncio.as_completed(steps):
                replies += [msgspec.msgpack.decode(reply, type=HostReply) for reply in await step]
                if refused := next((reply for reply in replies if isinstance(reply, Refused)), None):
                    raise rebuild(refused)
        finally:
            for step in steps:
                step.cancel()
        [serving] = [reply for reply in replies if isinstance(reply, ServingRank)]
        return Up(serving.address, [serving.node, *(reply.node for reply in replies if isinstance(reply, Joined))])

    def _host_in(self, group: PlacementGroup, room: Reservation, bundle: int) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = ray.remote(CellHost).options(
            num_cpus=room.cpus,
            num_gpus=room.gpus,
            resources=room.resources or None,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        return options.remote(str(self._logs), self._start_timeout_s)

    async def _reserve(self, name: str, spec: CellSpec, room: Reservation, num_bundles: int) -> PlacementGroup:
        """Raises NoRoom when no nodes have it within the start deadline, and ProcessFailed when the cluster forgot what was asked.

        NoRoom names what the nodes have.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        label = f"{spec.segment_prefix}-{name}-{spec.incarnation}"
        bundles = [room.bundle()] * num_bundles
        group = await self._in_thread(lambda: placement_group(bundles, strategy="PACK", name=label))
        try:
            is_placed = await self._in_thread(lambda: group.wait(self._start_timeout_s))
        except asyncio.CancelledError:
            self._threads.submit(remove_placement_group, group)
            raise
        except Exception as error:  # Ray has no type of its own for a group that went with its cluster: it raises a bare one
            raise process_failed(name, f"Ray does not place it: {error}", self._logs / f"{name}.log") from error
        if not is_placed:
            await self._in_thread(lambda: remove_placement_group(group))
            wanted = (
                f"no node has {in_words(room.bundle())}"
                if num_bundles == 1
                else f"no nodes have {num_bundles} x {in_words(room.bundle())}"
            )
            raise NoRoom(name, f"{wanted} free after {self._start_timeout_s:g} s. {await self._nodes()}")
        return group

    async def _nodes(self) -> str:
        import ray

        nodes = await self._in_thread(ray.nodes)
        alive = [f"{node['NodeManagerAddress']} {in_words(_of_interest(node['Resources']))}" for node in nodes if node["Alive"]]
        dead = [node["NodeManagerAddress"] for node in nodes if not node["Alive"]]
        return f"Nodes in all: {'; '.join(alive) or 'none'}" + (f"; dead: {', '.join(dead)}" if dead else "")

    def end(self, hosts: list[ActorHandle], group: PlacementGroup) -> None:
        """The actors' end is the cell's; its room is free for the next life."""
        import ray
        from ray.util.placement_group import remove_placement_group

        def end() -> None:
            try:
                for host in hosts:
                    ray.kill(host, no_restart=True)
            finally:
                remove_placement_group(group)

        self._threads.submit(end)

    async def _in_thread(self, job: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)

    async def close(self) -> None:
        import ray

        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=False)
        if self._is_ours:
            ray.shutdown()


def join_cluster(address: str, *, key: str) -> bool:
    """Connect this process to the Ray cluster at `address`; False when it is connected already. Raises ConfigError, naming `key`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {to_have('ray')}", key=key) from error
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    try:
        _expect_listener(wanted)
        dashboard = {} if wanted else {"include_dashboard": False}
        ray.init(address=wanted or None, log_to_driver=False, configure_logging=False, **dashboard)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {wanted or 'this machine'!r}: {error}; start one by `ray start`", key=key
        ) from error
    return True


def _expect_listener(address: str) -> None:
    """Ray itself tries for minutes where nobody listens. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def in_words(bundle: dict[str, float]) -> str:
    """
    >>> in_words({"CPU": 1.0, "trainer": 2})
    '1 CPU, 2 trainer'
    """
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _of_interest(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store", "memory"))}
