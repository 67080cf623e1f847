"""Two harness hosts as processes, one of them killed: what it had is to be dispatched again, nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError, ProcessFailed
from qwengyre.core.records import End, Validity
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.hosts import HarnessHosts
from qwengyre.runtime.run_config import load_run
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.host_wire import HostSpec
from qwengyre.sandbox.task import Task
from tests.integration.run_kit import RunKit, children, executions_done, kill, summary

pytestmark = pytest.mark.integration
DEADLINE_S = 300.0
WAITS = "import os, pathlib, sys, time\npathlib.Path('began').touch()\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
TEST_SH = '[ -e began ] && echo 1 > "$VERIFIER_DIR/reward.txt"\n'


class Hosts:
    """`num` hosts whose harnesses wait until a file is there."""

    def __init__(self, folder: Path, num: int, **harness: object) -> None:
        self.folder, self.go = folder, folder / "go"
        (folder / "harness.py").write_text(WAITS)
        tests = folder / "task" / "tests"
        tests.mkdir(parents=True)
        (folder / "task" / "environment").mkdir()
        (tests / "test.sh").write_text(TEST_SH)
        self.task = Task("task", str(folder / "task"), str(self.go), 300.0, 60.0)
        command = (sys.executable, str(folder / "harness.py"), "{instruction}")
        self.config = HarnessConfig(**{"command": command, "isolation": "none", "keep_failed": 0, "keep": "all", **harness})
        self.told: list[str] = []
        self.hosts = HarnessHosts(num, self._spec, folder, folder, RuntimeConfig())
        self.hosts.on_lost = self.told.append

    def _spec(self, number: int, incarnation: int) -> HostSpec:
        name = str(self.folder / f"h{number}-{incarnation}")
        gateways = (GatewayAddress(str(self.folder / "gateway" / "harness.sock"), "http://127.0.0.1:9"),)
        return HostSpec(self.config, gateways, f"{name}.work", str(self.folder / "kept"), f"{name}.sock", f"{name}.ready")

    def run(self, number: int, attempt: int = 0) -> asyncio.Task:
        async def num_calls() -> int:
            return 1

        spec = ExecutionSpec(f"e{number:06d}-0", self.task, "key", attempt=attempt)
        return asyncio.create_task(self.hosts.run_execution(spec, num_calls))

    async def wait_began(self, num: int) -> None:
        while len(list(self.folder.glob("h*.work/*/workspace/began"))) < num:
            await asyncio.sleep(0.02)

    def pid(self, number: int) -> int:
        return self.hosts._processes[number].pid


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


def test_a_host_that_is_killed_costs_its_executions_only_and_comes_back(tmp_path: Path):
    async def scenario() -> None:
        bench = Hosts(tmp_path, 2)
        await bench.hosts.start()
        try:
            running = [bench.run(number) for number in range(4)]
            await bench.wait_began(4)
            assert [bench.hosts.live[number].num_running for number in (0, 1)] == [2, 2]
            os.kill(bench.pid(1), signal.SIGKILL)
            lost = [await running[number] for number in (1, 3)]
            assert [(one.end, one.validity) for one in lost] == [(End.LOST, Validity.DROPPED)] * 2
            assert all(one.detail.startswith("host-1: ") for one in lost)
            assert not running[0].done() and not running[2].done()
            again = [bench.run(number, attempt=1) for number in (1, 3)]
            while 1 not in bench.hosts.live:
                await asyncio.sleep(0.02)
            late = bench.run(4)
            bench.go.touch()
            outcomes = await asyncio.gather(*running[0:4:2], *again, late)
            assert [(one.end, one.score) for one in outcomes] == [(End.EXITED, 1.0)] * 5, outcomes
            (told,) = bench.told
            assert told.startswith("host-1: ") and told.endswith("; its executions are dispatched again")
            kept = sorted(place.name for place in (tmp_path / "kept").iterdir())
            assert kept == ["e000000-0.0", "e000001-0.1", "e000002-0.0", "e000003-0.1", "e000004-0.0"]
            assert not (tmp_path / "h1-0.work").exists()
        finally:
            await bench.hosts.stop()

    play(scenario)


def test_an_execution_that_is_cancelled_ends_on_its_host(tmp_path: Path):
    async def scenario() -> None:
        bench = Hosts(tmp_path, 1)
        await bench.hosts.start()
        try:
            running = bench.run(0)
            await bench.wait_began(1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            while list(tmp_path.glob("h0-0.work/e0*")):
                await asyncio.sleep(0.02)
        finally:
            await bench.hosts.stop()

    play(scenario)


def test_a_host_that_cannot_give_isolation_says_so_at_the_start(tmp_path: Path):
    async def scenario() -> None:
        bench = Hosts(tmp_path, 1, isolation="bwrap")
        (tmp_path / "gateway").mkdir()
        (tmp_path / "gateway" / "control.sock").touch()
        with pytest.RaisesGroup(
            pytest.RaisesExc(ProcessFailed, match=r"error: .* needs a folder of its own: .* also holds control\.sock")
        ):
            await bench.hosts.start()
        await bench.hosts.stop()

    play(scenario)


def test_hosts_beside_a_reward_hook_are_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"hooks\.reward reads workspaces in the controller's process: leave out sandbox\.hosts"
    ):
        load_run(RunKit(tmp_path).run_file, ["sandbox.hosts=2", "hooks.reward=mine:reward"])


def test_a_run_on_two_hosts_of_which_one_is_killed_loses_nothing_that_had_finished(tmp_path: Path):
    kit = RunKit(tmp_path, steps=1, turns=2)
    process = kit.start("--set", "sandbox.hosts=2", "--set", "scheduler.num_cells=1", "--set", "evaluation.at_end=false")
    kit.wait_until(lambda: kit.has_begun() and bool(executions_done(kit.run_folder())), process)
    hosts = children(process.pid, ("host_process", "host-1.json"))
    assert len(hosts) == 1
    before = executions_done(kit.run_folder())
    kill(hosts[0])
    assert process.wait() == 0, kit.output()
    after = executions_done(kit.run_folder())
    assert {execution: after[execution] for execution in before} == before
    assert summary(kit.run_folder()).steps == 1
    assert kit.output(whole=True).count("; its executions are dispatched again") == 1
