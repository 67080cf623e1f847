"""`python -m checks.faults.inject SCRIPT.json ARGUMENTS`: `qwengyre ARGUMENTS` with faults that strike in the phases of the script.

The program is the real one. What is wrapped are the controller's own hands: it knows what is in flight at which cell, and so can strike
in the middle of it. An operation that was over before the blow fell does not count; the next one of its kind is taken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from checks.faults.network import drop_connections_of_port
from checks.faults.plan import PAUSE_S, Fault, Noted, Script
from qwengyre.cell import api
from qwengyre.cell.cell import CellSpec
from qwengyre.cli.main import main
from qwengyre.core.errors import CellFailed
from qwengyre.core.ids import CORE
from qwengyre.launchers.local import LocalLauncher, LocalLife
from qwengyre.runtime import train
from qwengyre.runtime.controller import Controller
from qwengyre.runtime.fleet import Fleet, LiveCell
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.scheduler import events as ev

INTO_OPERATION_S = (0.004, 0.002, 0.001, 0.0)
"""How long an operation has been under way when the blow falls; shorter each time that it was over by then."""
POLL_S = 0.02
START_DEADLINE_S = 120.0


class Injector:
    """One fault at a time. `fleet`, `controller` and `run` are the run's own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.coming = list(script.faults)
        self.struck: Fault | None = None
        self.num_missed = 0
        self.passed_s = 0.0
        self.controller: Controller | None = None
        self.run: train.Run | None = None

    def note(self, event: str, who: str = "") -> None:
        line = msgspec.json.encode(Noted(self.struck.name, event, self.passed_s, who)) + b"\n"
        with open(self.script.notes, "ab") as file:
            file.write(line)

    def next_in(self, phase: str, server: str) -> Fault | None:
        """The fault that is due when `server` is in `phase`."""
        if self.struck is not None or not self.coming or self.controller is None:
            return None
        fault = self.coming[0]
        whose = fault.at or (fault.victim if fault.victim.startswith(("cell", "standalone")) else server)
        return fault if (fault.phase, whose) == (phase, server) else None

    async def in_operation(self, phase: str, server: str, task: asyncio.Task) -> None:
        """Strike while `task` is under way, if a fault is due."""
        fault = self.next_in(phase, server)
        if fault is None:
            return
        await asyncio.wait({task}, timeout=INTO_OPERATION_S[min(self.num_missed, len(INTO_OPERATION_S) - 1)])
        if task.done() or self.next_in(phase, server) is not fault:
            self.num_missed += 1
            return
        self.strike(fault)

    def strike(self, fault: Fault) -> None:
        self.struck, self.num_missed = self.coming.pop(0), 0
        self.note("struck")
        match fault.how:
            case "kill":
                os.kill(self.pid(fault.victim), signal.SIGKILL)
            case "stall":
                os.kill(self.pid(fault.victim), signal.SIGSTOP)
            case "pause":
                self.pause(self.pid(fault.victim))
            case "cut":
                self.script.network.cut(fault.victim)
            case "reset" if fault.victim == "harness":
                drop_connections_of_port(self.run._gateways[0].port)
            case "reset":
                self.script.network.drop_connections(fault.victim)
        if fault.how in ("pause", "reset") or fault.victim in ("harness", "evaluator"):
            asyncio.get_running_loop().call_later(2 * PAUSE_S, self.over)

    def pause(self, pid: int) -> None:
        """A process of its own goes on with it: the controller may be the victim."""
        if os.fork() == 0:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)

    def pid(self, victim: str) -> int:
        if victim == "controller":
            return os.getpid()
        if victim == "gateway":
            return self.run._gateways[0]._child.pid
        if victim in ("harness", "evaluator"):
            return self.program_of(victim)
        fleet = self.controller.fleet
        [pid] = [life.process.address.pid for number, life in fleet.cells.items() if fleet.server(number) == victim]
        return pid

    def program_of(self, victim: str) -> int:
        """The process id of a harness or of an evaluator that runs now; 0 for none."""
        mark = b"harness.py" if victim == "harness" else b"test.sh"
        for pid in _descendants(os.getpid()):
            try:
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return 0

    def lost(self, server: str) -> None:
        if self.struck is None:
            return
        self.note("lost", server)
        if self.struck.how == "cut" and server == self.struck.victim:
            self.script.network.mend(server)

    def back(self, server: str) -> None:
        if self.struck is not None:
            self.note("back", server)
            if server == self.struck.victim:
                self.over()

    def over(self) -> None:
        self.struck = None

    async def wait_over(self) -> None:
        """Before a step is opened: a slow machine gets the time to start what was lost. The core itself is waited for anyway."""
        deadline = time.monotonic() + START_DEADLINE_S
        while self.struck is not None and self.struck.victim != "cell-0" and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def keep_time(self) -> None:
        """Heartbeats and their deadlines are late when the machine is busy, and so is this."""
        while True:
            await asyncio.sleep(POLL_S)
            self.passed_s += POLL_S

    async def watch_rollout(self) -> None:
        """Faults that strike while calls run, and those of programs that no order names."""
        while True:
            await asyncio.sleep(POLL_S)
            if not self.coming or self.struck is not None:
                continue
            fault = self.coming[0]
            if fault.phase != "rollout":
                continue
            if await self.is_under_way(fault):
                self.strike(fault)

    async def is_under_way(self, fault: Fault) -> bool:
        """The victim is at work for calls at this moment."""
        if fault.victim in ("harness", "evaluator"):
            return self.program_of(fault.victim) > 0
        fleet = self.controller.fleet
        lives = {fleet.server(number): life for number, life in fleet.cells.items() if life.is_serving}
        asked = [lives[fault.victim]] if fault.victim in lives else list(lives.values())
        if fault.victim.startswith(("cell", "standalone")) and fault.victim not in lives:
            return False
        return any([await _has_calls(life) for life in asked])


async def _has_calls(life: LiveCell) -> bool:
    try:
        report = await life.client.call(api.Health(), api.HealthReport, 1.0)
    except CellFailed:
        return False
    return report.capacity.running > 0


def _descendants(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = [int(word) for word in (thread / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)] if Path(f"/proc/{child}").exists() else []
    return found


def cells_that_write_down(script: Script) -> None:
    """Cells write down what they make, in namespaces of their own if the script wants it."""
    start, launch = asyncio.create_subprocess_exec, LocalLauncher.launch

    async def start_recording(*command: str, **options):
        if "qwengyre.cell.cell" in command:
            words = (sys.executable, "-m", "checks.faults.recording_cell", script.made)
            if script.network is not None:
                words = ("ip", "netns", "exec", script.network.namespace(Path(command[-1]).stem), *words)
            command = (*words, *command)
        return await start(*command, **options)

    async def launch_in_namespace(self: LocalLauncher, name: str, spec: CellSpec) -> LocalLife:
        if script.network is None:
            return await launch(self, name, spec)
        there = LocalLauncher(self._private, self._logs, self._start_timeout_s, script.network.address(name))
        return await launch(there, name, spec)

    asyncio.create_subprocess_exec, LocalLauncher.launch = start_recording, launch_in_namespace


def wrap(injector: Injector) -> None:
    """Put the injector between the controller and its hands."""
    call, report_lost, move = Fleet.call, Fleet.report_lost, GatewayClient.move
    post, gateway_restarted, run_controller = Controller.post, Controller.gateway_restarted, Controller.run
    assemble = train.Run._assemble

    async def struck_call(self, cell, operation, expected, timeout_s=None):
        if cell == CORE and isinstance(operation, api.BeginStep):
            await injector.wait_over()
        task = asyncio.ensure_future(call(self, cell, operation, expected, timeout_s))
        await injector.in_operation(type(operation).__name__, self.server(cell), task)
        return await task

    async def struck_move(self, source, moves):
        task = asyncio.ensure_future(move(self, source, moves))
        if moves:
            await injector.in_operation("Move", source, task)
        return await task

    def noted_loss(self, cell, live, reason) -> None:
        if self.cells.get(cell) is live:
            injector.lost(self.server(cell))
        report_lost(self, cell, live, reason)

    def noted_post(self, kind, **fields) -> None:
        post(self, kind, **fields)
        if kind is ev.CellReturned:
            injector.back(self.fleet.server(fields["cell"]))
        elif kind is ev.StandaloneReturned:
            injector.back(f"standalone-{fields['index']}")

    async def noted_restart(self, gateway) -> None:
        await gateway_restarted(self, gateway)
        injector.back("gateway")

    async def watched_run(self, restart=()) -> None:
        watching = [asyncio.create_task(task) for task in (injector.watch_rollout(), injector.keep_time())]
        try:
            await run_controller(self, restart)
        finally:
            for task in watching:
                task.cancel()

    async def known_assemble(self, stack) -> Controller:
        injector.run, injector.controller = self, await assemble(self, stack)
        return injector.controller

    Fleet.call, Fleet.report_lost, GatewayClient.move = struck_call, noted_loss, struck_move
    Controller.post, Controller.gateway_restarted, Controller.run = noted_post, noted_restart, watched_run
    train.Run._assemble = known_assemble
    cells_that_write_down(injector.script)


if __name__ == "__main__":
    wrap(Injector(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Script)))
    sys.argv = ["qwengyre", *sys.argv[2:]]
    main()
