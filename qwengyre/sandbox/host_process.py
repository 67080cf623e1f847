"""A harness host: a process that runs harnesses and scores workspaces for a controller. `python -m qwengyre.sandbox.host_process SPEC.json`.

It decides nothing. What it runs ends with it, however that ends; workspaces that are to be kept it puts into the run folder itself.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from qwengyre.core.errors import HarnessLost, QwenGyreError
from qwengyre.core.records import Outcome
from qwengyre.rpc.processes import announce
from qwengyre.rpc.server import Done, Handlers, RpcServer, Service
from qwengyre.sandbox.harness import ExecutionSpec
from qwengyre.sandbox.host_wire import HarnessOver, HostReport, HostSpec, Look, RunHarness, ScoreWorkspace, StopExecution
from qwengyre.sandbox.launcher import Launcher
from qwengyre.telemetry.log_lines import log_to

log = logging.getLogger("qwengyre.harness_host")


class Placed:
    """One execution on this host."""

    def __init__(self, launcher: Launcher, spec: ExecutionSpec) -> None:
        self._is_empty = asyncio.Event()
        self._num_calls: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.outcome = asyncio.create_task(launcher.run_execution(spec, self._count), name=f"{spec.execution}.{spec.attempt}")

    async def _count(self) -> int:
        self._is_empty.set()
        return await self._num_calls

    async def wait_harness(self) -> Outcome | None:
        """Until the harness is gone: its outcome if that was all, None if its workspace waits to be scored."""
        empty = asyncio.create_task(self._is_empty.wait())
        try:
            await asyncio.wait({empty, self.outcome}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            empty.cancel()
        return self.outcome.result() if self.outcome.done() else None

    async def score(self, num_calls: int) -> Outcome:
        if not self._num_calls.done():
            self._num_calls.set_result(num_calls)
        return await asyncio.shield(self.outcome)


class HarnessHost:
    """The executions of one host, by name and attempt: a request that comes again finds the one that is there."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._placed: dict[tuple[str, int], Placed] = {}

    def handlers(self) -> Handlers:
        return {RunHarness: self.run, ScoreWorkspace: self.score, StopExecution: self.stop, Look: self.look}

    async def run(self, asked: RunHarness) -> HarnessOver:
        name = asked.spec.execution, asked.spec.attempt
        placed = self._placed.get(name) or self._placed.setdefault(name, Placed(self._launcher, asked.spec))
        try:
            outcome = await placed.wait_harness()
        except BaseException:
            self._placed.pop(name, None)
            raise
        if outcome is not None:
            self._placed.pop(name, None)
        return HarnessOver(outcome)

    async def score(self, asked: ScoreWorkspace) -> HarnessOver:
        name = asked.execution, asked.attempt
        placed = self._placed.get(name)
        if placed is None:
            raise HarnessLost(f"{asked.execution}.{asked.attempt} is not on this host")
        try:
            return HarnessOver(await placed.score(asked.num_calls))
        finally:
            self._placed.pop(name, None)

    async def stop(self, asked: StopExecution) -> Done:
        placed = self._placed.pop((asked.execution, asked.attempt), None)
        if placed is not None:
            placed.outcome.cancel()
            await asyncio.gather(placed.outcome, return_exceptions=True)
        return Done()

    async def look(self, asked: Look) -> HostReport:
        return HostReport(len(self._placed))

    async def close(self) -> None:
        """End every execution."""
        for name, attempt in list(self._placed):
            await self.stop(StopExecution(name, attempt))


@asynccontextmanager
async def serving_host(spec: HostSpec) -> AsyncIterator[None]:
    """A host that serves from this process as long as the context lasts. Raises SandboxError."""
    work, kept = Path(spec.work), Path(spec.kept)
    async with Launcher(spec.harness, spec.gateways, work=work, failed=kept, sample=kept) as launcher:
        host = HarnessHost(launcher)
        server = RpcServer(None, lambda: Service(host.handlers()))
        await server.listen(f"unix:{spec.socket}")
        try:
            yield
        finally:
            await server.close()
            await host.close()


async def serve(spec: HostSpec) -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving_host(spec):
        announce(Path(spec.ready_file), b"")
        log.info("harness_host_serves", extra={"socket": spec.socket})
        await stop.wait()


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HostSpec)
    log_to(None)
    try:
        asyncio.run(serve(spec))
    except QwenGyreError as error:  # isolation that cannot be given: the controller shows the end of this log
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
