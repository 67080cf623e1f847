"""Start harnesses by forking a process that has imported them already (`zygote.py`): the launcher's side.

A Python harness with the official `openai` client needs most of a second to import it; a forked one starts in a few milliseconds. Each
execution still gets its own bubblewrap sandbox, held open by a shell that waits; the forked child joins it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import qwengyre
from qwengyre.core.errors import HarnessLost, SandboxError
from qwengyre.rpc.logs import log_tail
from qwengyre.sandbox.channel import receive, send
from qwengyre.sandbox.cold import harness_input, harness_view
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress, HarnessFiles, harness_command, harness_environment
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import RELAY_PORT, WORKSPACE, interpreter
from qwengyre.sandbox.limits import shell_close
from qwengyre.sandbox.plans import Message, WarmPlan
from qwengyre.sandbox.process import Process, Program, children, nameless_file, wait_readable
from qwengyre.sandbox.room import Room
from qwengyre.sandbox.spawner import run_from_memory

log = logging.getLogger(__name__)

PRELOAD_TIMEOUT_S: Final = 120.0  # the modules may import torch from a cold disk
HOLDER_TIMEOUT_S: Final = 60.0  # a moment each, but many sandboxes may be made at once
HOLDER: Final = ("/bin/bash", "--noprofile", "--norc", "-c")
"""Process 1 of a warm sandbox: says that the sandbox is made, holds it until its input closes, and reaps orphans."""
EXIT_AFTER_KILL: Final = 137
NOT_ON_IMAGE: Final = "a warm harness has this machine's libraries and modules loaded, which an image does not have: set warm_start = false in [harness]"


class WarmStarter:
    """Owns one zygote; restarts it if it dies. `start` raises SandboxError when a sandbox or the zygote cannot be made, and HarnessLost
    when the zygote dies over it."""

    def __init__(self, host: SandboxHost):
        self._host = host
        self._modules = (*host.config.warm_modules, *([host.config.module] if host.config.module else []))
        self._process: Process | None = None
        self._control: socket.socket | None = None
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._numbers = 0
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Start the zygote and wait until it has imported the harness. Raises SandboxError, saying what its import did."""
        async with self._starting:
            if self._control is not None:
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            log = os.open(self._host.work / "zygote.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            command = [sys.executable, "-P", "-m", "qwengyre.sandbox.zygote", str(theirs.fileno()), *self._modules]
            environment = self._host.environment("/nonexistent") | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            search = [self._host.config.env.get("PYTHONPATH", ""), str(Path(qwengyre.__file__).parents[1])]
            environment["PYTHONPATH"] = ":".join(filter(None, search))
            try:
                program = Program(command, environment, log, pass_fds=[theirs.fileno()])
                self._process = self._host.start(run_from_memory(program, interpreter()))
            finally:
                theirs.close()
                os.close(log)
            await self._wait_ready(ours)
            ours.setblocking(False)
            self._control = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_message)

    async def _wait_ready(self, control: socket.socket) -> None:
        try:
            async with asyncio.timeout(PRELOAD_TIMEOUT_S):
                await wait_readable(control.fileno())
            received = receive(control)
        except TimeoutError:
            received = ({"failed": f"importing took more than {PRELOAD_TIMEOUT_S:g} s"}, [])
        if received is None or "ready" not in received[0]:
            control.close()
            await self.close()
            reason = received[0]["failed"] if received else log_tail(self._host.work / "zygote.log")
            raise SandboxError(f"harness.warm_start: {', '.join(self._modules)} cannot be imported ahead: {reason}")

    async def start(self, gateway: GatewayAddress, spec: ExecutionSpec, files: HarnessFiles, room: Room) -> WarmProcess:
        """Fork the harness of `spec` into a new sandbox."""
        if spec.task.image is not None:
            raise SandboxError(NOT_ON_IMAGE)
        await self.open()
        holder = await self._open_sandbox(gateway, files, room) if self._host.isolated else None
        self._numbers += 1
        number = self._numbers
        exited = self._exits[number] = asyncio.get_running_loop().create_future()
        process = WarmProcess(self, number, holder, exited)
        try:
            plan = nameless_file("plan", json.dumps(self._plan(gateway, spec, files)).encode())
            try:
                pid = children(holder.pid)[0] if holder else 0
                self._send({"id": number, "holder": pid}, [plan, room.output, *room.cgroup_fds])
            finally:
                os.close(plan)
        except BaseException:
            exited.cancel()
            await process.kill()
            raise
        return process

    def _plan(self, gateway: GatewayAddress, spec: ExecutionSpec, files: HarnessFiles) -> WarmPlan:
        return {
            "command": harness_command(self._host, spec, files),
            "env": harness_environment(self._host, gateway, spec, files),
            "cwd": WORKSPACE if self._host.isolated else str(files.workspace),
            "stdin": harness_input(self._host, files),
            "rlimits": self._host.rlimits(),
            "relay": {"port": RELAY_PORT, "socket": gateway.socket},
        }

    async def _open_sandbox(self, gateway: GatewayAddress, files: HarnessFiles, room: Room) -> Process:
        """Have bubblewrap make a sandbox and wait until it is complete. Raises SandboxError with what bubblewrap said."""
        view = harness_view(self._host, gateway, files)
        command = [*HOLDER, f"{shell_close(room.identity_fds)}; echo; read"]
        program = Program(command, {}, room.output, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holder = self._host.start(self._host.sandboxed(view, program, room.identity))
        try:
            async with asyncio.timeout(HOLDER_TIMEOUT_S):
                await wait_readable(holder.stdout.fileno())
            if holder.stdout.read(1):
                holder.stdout.close()
                return holder
        except BaseException:
            await holder.kill()
            raise
        await holder.kill()
        raise SandboxError(f"no sandbox: {log_tail(files.log)}")

    def send_kill(self, number: int) -> None:
        """Have the supervisor of a harness without isolation end it and everything below it."""
        if number in self._exits:
            self._send({"kill": number})

    def forget(self, number: int) -> None:
        self._exits.pop(number, None)

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._control is None:
            raise HarnessLost(self._last_words)
        try:
            send(self._control, message, fds or [])
        except OSError as error:
            raise HarnessLost(f"the process that harnesses are forked from cannot be reached: {error}") from None

    def _on_message(self) -> None:
        assert self._control is not None, "registered only while it is open"
        try:
            received = receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._lose_zygote()
            return
        message = received[0]
        exited = self._exits.get(message["id"])
        if exited is None or exited.done():
            return
        if "lost" in message:
            exited.set_exception(HarnessLost(message["lost"]))
        elif "error" in message:
            exited.set_exception(SandboxError(f"the harness could not enter its sandbox: {message['error']}"))
        else:
            exited.set_result(message["exit"])

    def _lose_zygote(self) -> None:
        """The zygote died: its harnesses are lost, whatever they had done; the next start makes another zygote."""
        self._close_control()
        log.error("zygote_died", extra={"num_harnesses": len(self._exits)})
        for exited in self._exits.values():
            if not exited.done():
                exited.set_exception(HarnessLost(self._last_words))

    @property
    def _last_words(self) -> str:
        return f"the process that harnesses are forked from died\n{log_tail(self._host.work / 'zygote.log')}".strip()

    def _close_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    async def close(self) -> None:
        """End the zygote and its relay."""
        self._close_control()
        if self._process is not None:
            await self._process.kill()
            self._process = None


class WarmProcess:
    """A forked harness and the sandbox it is in."""

    def __init__(self, starter: WarmStarter, number: int, holder: Process | None, exited: asyncio.Future[int]):
        self._starter = starter
        self._number = number
        self._holder = holder
        self._exited = exited

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """See HarnessProcess. Raises SandboxError when the harness could not enter its sandbox, HarnessLost when what it needs died."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._exited)
        except TimeoutError:
            return None

    async def kill(self) -> int:
        """See HarnessProcess."""
        if self._holder is not None:
            await self._holder.kill()
            self._holder.close_pipes()
        else:
            self._starter.send_kill(self._number)
        code = await asyncio.shield(asyncio.ensure_future(self._exit_code()))
        self._starter.forget(self._number)
        return code

    async def _exit_code(self) -> int:
        done, _ = await asyncio.wait([self._exited])
        ended = next(iter(done))
        failed = ended.cancelled() or ended.exception() is not None
        return EXIT_AFTER_KILL if failed else ended.result()
