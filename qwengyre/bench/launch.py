"""What it costs to start, score and clear away one execution: CPU time, cold and warm, in one run.

The harness imports the official `openai` client, makes one and ends; the evaluator is bash and one bare Python. CPU time is that of this
process and of everything that it started; work that the kernel does on its own threads is not in it.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from qwengyre.bench.output import say
from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End
from qwengyre.sandbox.config import HarnessConfig, Isolation, LimitsConfig
from qwengyre.sandbox.disk_threads import DiskThreads
from qwengyre.sandbox.disk_watch import DiskWatch
from qwengyre.sandbox.evaluator import Evaluator
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.task import Task, load_task

HARNESS: Final = "qwengyre.bench.idle_harness"
TEST_SH: Final = """python3 -I -S -c 'import os; print(0.5, file=open(os.environ["VERIFIER_DIR"] + "/reward.txt", "w"))'\n"""


class LaunchCost(msgspec.Struct, frozen=True):
    """Per execution, in milliseconds."""

    cpu_ms: float
    wall_ms: float


def launch(
    executions: Annotated[int, typer.Option(min=1, help="How many of each kind.")] = 50,
    at_once: Annotated[int, typer.Option(min=1, help="How many run at the same time.")] = 8,
    isolation: Annotated[Isolation, typer.Option(help="What harnesses are kept in.")] = "bwrap",
) -> None:
    """CPU time of starting and clearing away one execution, cold and warm, and of its evaluator."""
    costs = asyncio.run(measure(executions, at_once, isolation))
    say(f"{'':12} {'CPU ms':>8} {'wall ms':>8}   per execution, {executions} each, {at_once} at once, isolation {isolation}")
    for name, cost in costs.items():
        say(f"{name:12} {cost.cpu_ms:8.1f} {cost.wall_ms:8.1f}")
    say(f"warm start: {costs['cold'].cpu_ms / costs['warm'].cpu_ms:.1f} times less CPU than cold")


async def measure(num_executions: int, at_once: int, isolation: Isolation) -> dict[str, LaunchCost]:
    """Name -> cost of `cold` and `warm` (harness only) and of `evaluator`. Raises SandboxError when an execution does not end well."""
    with tempfile.TemporaryDirectory(prefix="qwengyre-bench-") as folder:
        task = _make_task(Path(folder) / "task")
        limits = LimitsConfig(best_effort=True)
        config = HarnessConfig(command=("python3", "-m", HARNESS), isolation=isolation, limits=limits)
        evaluator = await _evaluations(config, task, Path(folder) / "evaluator", num_executions, at_once)
        costs = {"evaluator": evaluator}
        for name in ("cold", "warm"):
            own = msgspec.structs.replace(config, warm_start=name == "warm")
            total = await _executions(own, task, Path(folder) / name, num_executions, at_once)
            costs[name] = LaunchCost(total.cpu_ms - evaluator.cpu_ms, total.wall_ms - evaluator.wall_ms)
        return costs


async def _executions(config: HarnessConfig, task: Task, folder: Path, num_executions: int, at_once: int) -> LaunchCost:
    gateway = GatewayAddress(str(folder / "gateway" / "harness.sock"), "http://127.0.0.1:1")
    (folder / "gateway").mkdir(parents=True)
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), gateway.socket)

    async def one_call() -> int:
        return 1

    async def run(launcher: Launcher, index: int) -> None:
        outcome = await launcher.run_execution(ExecutionSpec(f"e{index:06d}-0", task, "secret"), one_call)
        if outcome.end is not End.EXITED:
            raise SandboxError(f"bench: {outcome.end.value}: {outcome.detail}")

    async def session(count: int) -> LaunchCost:
        before, started = _cpu_s(), time.perf_counter()
        async with Launcher(config, [gateway], work=folder / "work", failed=folder / "failed") as launcher:
            ready = time.perf_counter()
            for start in range(0, count, at_once):
                async with asyncio.TaskGroup() as group:
                    for index in range(start, min(start + at_once, count)):
                        group.create_task(run(launcher, index))
            ended = time.perf_counter()
        assert started <= ready
        return LaunchCost(1000 * (_cpu_s() - before), 1000 * (ended - ready))

    idle = await session(0)
    total = await session(num_executions)
    server.close()
    return LaunchCost((total.cpu_ms - idle.cpu_ms) / num_executions, total.wall_ms / num_executions)


async def _evaluations(config: HarnessConfig, task: Task, folder: Path, num_executions: int, at_once: int) -> LaunchCost:
    host = SandboxHost(config, folder / "work")
    threads = DiskThreads()
    evaluator = Evaluator(host, threads, DiskWatch(config.limits))

    async def run(index: int) -> None:
        place = folder / f"e{index}"
        (place / "workspace").mkdir(parents=True)
        verdict = await evaluator.evaluate(task, place / "workspace", place)
        if verdict.failure or verdict.note:
            raise SandboxError(f"bench: {verdict.failure or verdict.note}")

    before, started = _cpu_s(), time.perf_counter()
    for start in range(0, num_executions, at_once):
        async with asyncio.TaskGroup() as group:
            for index in range(start, min(start + at_once, num_executions)):
                group.create_task(run(index))
    cost = LaunchCost(1000 * (_cpu_s() - before) / num_executions, 1000 * (time.perf_counter() - started) / num_executions)
    threads.close()
    host.close()
    return cost


def _make_task(folder: Path) -> Task:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 60\n")
    (folder / "instruction.md").write_text("Say hello.\n")
    (folder / "tests" / "test.sh").write_text(TEST_SH)
    return load_task(folder)


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
