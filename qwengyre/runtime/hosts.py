"""The harness hosts of a run: started, watched and replaced as cells are. An execution goes to the host that has the fewest.

RUNNING --ended, or silent--> its executions are over as `End.LOST`, to be dispatched again; a new process takes its place
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from qwengyre.core.errors import HarnessLost, Unreachable
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.rpc.client import Client
from qwengyre.rpc.heartbeat import wait_lost
from qwengyre.rpc.processes import Supervised, start_process
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.give_up import Losses
from qwengyre.sandbox.harness import ExecutionSpec
from qwengyre.sandbox.host_wire import HarnessOver, HostReport, HostSpec, Look, RunHarness, ScoreWorkspace, StopExecution
from qwengyre.sandbox.launcher import Rewarded

log = logging.getLogger(__name__)
MARGIN_S = 600.0
"""Beyond `harness.overall_timeout_s`: a host that answers its heartbeats and does not end an execution by then has lost it."""


class LiveHost:
    """One life of one host."""

    def __init__(self, name: str, spec: HostSpec) -> None:
        self.name, self.spec = name, spec
        self.client = Client(f"unix:{spec.socket}", None)
        self.num_running = 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str) -> None:
        """This life is over, whether its process knows it or not."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def run_execution(self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]]) -> Outcome:
        """As `Launcher.run_execution`; an Outcome of `End.LOST` when this life is over first."""
        began, is_over = time.monotonic(), False
        self.num_running += 1
        try:
            outcome = await self._call(RunHarness(spec))
            if outcome is None:
                outcome = await self._call(ScoreWorkspace(spec.execution, spec.attempt, await num_calls()))
            is_over = True
            assert outcome is not None, "a workspace that was scored has an outcome"
            return outcome
        except HarnessLost as error:
            return Outcome(End.LOST, Validity.DROPPED, 0.0, "", time.monotonic() - began, detail=str(error))
        finally:
            self.num_running -= 1
            if not is_over:
                self.client.request_nowait(StopExecution(spec.execution, spec.attempt))

    async def _call(self, request: RunHarness | ScoreWorkspace) -> Outcome | None:
        """Raises HarnessLost when this life is over before it has answered, and what the host refused with."""
        timeout_s = self.spec.harness.overall_timeout_s + MARGIN_S
        asking = asyncio.create_task(self.client.call(request, HarnessOver, timeout_s))
        try:
            either: set[asyncio.Future[Any]] = {asking, self.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise HarnessLost(f"{self.name}: {self.lost.result()}")
            return asking.result().outcome
        except Unreachable as error:
            self.give_up(error.reason)
            raise HarnessLost(f"{self.name}: {error.reason}") from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


class HarnessHosts:
    """Has the interface that `Executions` needs of a `Launcher`. `make_spec(number, incarnation)` gives every life folders of its own.

    `on_lost(line)` tells the user of a host that was lost.
    """

    def __init__(
        self, num: int, make_spec: Callable[[int, int], HostSpec], private: Path, logs: Path, config: RuntimeConfig
    ) -> None:
        self._make_spec, self._private, self._logs, self._config = make_spec, private, logs, config
        self._num = num
        self.live: dict[int, LiveHost] = {}
        self._processes: dict[int, Supervised] = {}
        self._changed = asyncio.Condition()
        self._losses = Losses()
        self._watches: list[asyncio.Task[None]] = []
        self.on_lost: Callable[[str], None] = lambda line: None

    async def start(self) -> None:
        """Raises ProcessFailed, among the errors of a group."""
        async with asyncio.TaskGroup() as starting:
            for number in range(self._num):
                starting.create_task(self._launch(number, 0), name=f"start host {number}")
        self._watches = [asyncio.create_task(self._keep_alive(number), name=f"host {number}") for number in range(self._num)]

    async def wait_failed(self) -> NoReturn:
        """Until a host is lost for good. Raises ProcessFailed, ProcessGaveUp."""
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        next(iter(done)).result()
        raise AssertionError("a host is kept alive until it is stopped or cannot be")

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for live in self.live.values():
            live.client.close()
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    async def run_execution(
        self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]], rewarded: Rewarded | None = None
    ) -> Outcome:
        """On the host with the fewest executions; waits while none lives."""
        assert rewarded is None, "a run with hooks.reward has no hosts (RunConfig)"
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._serving()))
            host = self.live[least_busy({number: live.num_running for number, live in self._serving().items()})]
        return await host.run_execution(spec, num_calls)

    def _serving(self) -> dict[int, LiveHost]:
        return {number: live for number, live in self.live.items() if not live.lost.done()}

    async def _launch(self, number: int, incarnation: int) -> None:
        spec, name = self._make_spec(number, incarnation), f"host-{number}"
        orders = self._private / f"{name}.json"
        orders.touch(mode=0o600)
        orders.write_bytes(msgspec.json.encode(spec))
        env = {"OMP_NUM_THREADS": "1"}
        ready, timeout_s = Path(spec.ready_file), self._config.start_timeout_s
        module = "qwengyre.sandbox.host_process"
        process = await start_process(module, [str(orders)], self._logs / f"{name}.log", ready, env=env, timeout_s=timeout_s)
        async with self._changed:
            self.live[number] = LiveHost(name, spec)
            self._processes[number] = process
            self._changed.notify_all()

    async def _keep_alive(self, number: int) -> None:
        incarnation = 0
        while True:
            live = self.live[number]
            reason = await self._wait_lost(live, self._processes[number])
            live.give_up(reason)
            log.error("harness_host_lost", extra={"host": number, "reason": reason})
            del self.live[number]
            self._processes[number].kill()
            await self._processes[number].wait_exit()
            live.client.close()
            self.on_lost(f"{live.name}: {reason}; its executions are dispatched again")
            await asyncio.to_thread(shutil.rmtree, live.spec.work, True)
            self._losses.see(live.name, asyncio.get_running_loop().time())
            incarnation += 1
            await self._launch(number, incarnation)

    async def _wait_lost(self, live: LiveHost, process: Supervised) -> str:
        async def ended() -> str:
            exited = asyncio.create_task(process.wait_exit())
            try:
                either: set[asyncio.Future[Any]] = {exited, live.lost}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                return f"its process ended with {exited.result()}" if exited.done() else live.lost.result()
            finally:
                exited.cancel()

        async def ping(timeout_s: float) -> None:
            await live.client.call(Look(), HostReport, timeout_s)

        return await wait_lost(ended(), ping, self._config.heartbeat_s)


def least_busy(num_running: Mapping[int, int]) -> int:
    """The host with the fewest executions; of equals the first.

    >>> least_busy({0: 3, 1: 2, 2: 2})
    1
    """
    return min(num_running, key=lambda number: (num_running[number], number))
