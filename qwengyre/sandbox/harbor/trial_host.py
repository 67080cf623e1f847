"""Run Harbor's trials, each in a process of its own: `python -P trial_host.py CHANNEL`, by an interpreter that has Harbor.

It imports the standard library and Harbor, nothing of QwenGyre. CHANNEL is the number of a Unix socket of messages (SOCK_SEQPACKET), each
a JSON object:

    <- open    agent, environment             -> ready {harbor}, or refused {key, reason}
    <- start   trial, config, environ, log    -> agent-start, agent-end {error, message}: the trial waits for `go` at each
    <- go      trial                          -> result {rewards, is_verified, error, message}
    <- stop    trial                          -> over {code}: the process of the trial has ended, and so has its environment

A trial is forked from this process, which has imported Harbor for all of them. Its address and key of the model are in its own
variables and nowhere else: agents that read `os.environ` find those of their execution. When CHANNEL is closed, or this process
is told to end or is killed, every trial is cancelled: Harbor then takes its environment down.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MESSAGE_BYTES = 65536
"""Of one message; well under what a Unix socket takes by default."""
SAID_CHARS = 4000
"""Of what an exception says: the end of an agent's output, for a user to read."""
LEAST, BELOW = (0, 25), (0, 27)
"""Versions of Harbor whose interface this program knows."""
STOP_GRACE_S = 120.0
"""How long Harbor may take to bring a cancelled trial's environment down; a container engine waits 10 s for each container."""
PR_SET_PDEATHSIG = 1


class HarborRefuses(Exception):
    """`args`: the key of [sandbox.harbor] that is wrong, and why."""


def open_harbor(wanted: dict[str, Any]) -> str:
    """Import Harbor, the agent and the environment, so that no trial has to. The version; raises HarborRefuses."""
    try:
        version = importlib.metadata.version("harbor")
    except importlib.metadata.PackageNotFoundError:
        raise HarborRefuses(
            "python", f"{sys.executable} has no Harbor: {sys.executable} -m pip install 'harbor>=0.25,<0.27'"
        ) from None
    if not LEAST <= tuple(int(part) for part in version.split(".")[:2]) < BELOW:
        raise HarborRefuses("python", f"{sys.executable} has Harbor {version}; 0.25 and 0.26 are known here")
    from harbor.agents.factory import AgentFactory
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.trial.config import TrialConfig

    importlib.import_module("harbor.trial.trial")
    importlib.import_module("harbor.trial.regrade")
    config = TrialConfig.model_validate({"task": {"path": "."}, "trial_name": "open", "agent": wanted["agent"]})
    with refused("agent"):
        agent = AgentFactory.get_agent_class_from_config(config.agent)
    with refused("agent_kwargs"):
        agent.preflight(kwargs=dict(config.agent.kwargs), env=dict(config.agent.env))
    environment = wanted["environment"]
    names = [one.value for one in EnvironmentType]
    if environment.get("type") is not None and environment["type"] not in names:
        raise HarborRefuses("environment", f"Harbor {version} has no {environment['type']!r}: it has {', '.join(names)}")
    kind = EnvironmentType(environment["type"]) if environment.get("type") else None
    with refused("environment"):
        EnvironmentFactory.run_preflight(type=kind, import_path=environment.get("import_path"), kwargs=environment.get("kwargs"))
    return version


@contextlib.contextmanager
def refused(key: str) -> Any:
    """What Harbor objects to, as HarborRefuses. It exits where a program of an environment is missing."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise HarborRefuses(key, f"{error}"[:SAID_CHARS] or type(error).__name__) from error


class Running:
    """One trial in a process, as its parent knows it."""

    def __init__(self, pid: int, go: int, order: dict[str, Any]) -> None:
        self.pid, self.go, self.order = pid, go, order
        self.pidfd = os.pidfd_open(pid)
        self.deadline = float("inf")
        """When it is killed, if it has not ended by then."""

    def stop(self) -> None:
        """Ask it to cancel its trial. Only the first time counts."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + STOP_GRACE_S
            os.kill(self.pid, signal.SIGTERM)

    def reap(self) -> int:
        """Exit code (128 + signal) of the ended process; what it left of its session is killed."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.pidfd)
        os.close(self.go)
        return code if code >= 0 else 128 - code


class Host:
    """Starts, tells and ends trials."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: dict[int, Running] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._is_closing = False

    def send(self, **message: Any) -> None:
        """To whoever started this process; nobody, when it is gone."""
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode())

    def serve(self) -> None:
        """Until the channel is closed and every trial has ended."""
        while not self._is_closing or self._running:
            nearest = min((one.deadline for one in self._running.values()), default=float("inf"))
            wait_s = None if nearest == float("inf") else max(0.0, nearest - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._channel:
                    self._hear()
                else:
                    self._end(key.data)
            for one in self._running.values():
                if one.deadline <= time.monotonic():
                    os.kill(one.pid, signal.SIGKILL)

    def _hear(self) -> None:
        data = self._channel.recv(MESSAGE_BYTES)
        if not data:
            self.close()
            return
        message = json.loads(data)
        one = self._running.get(message["trial"])
        match message["op"]:
            case "start":
                self._start(message, run_trial)
            case "go" if one is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(one.go, b"1")
            case "stop" if one is not None:
                one.stop()

    def close(self, *_: object) -> None:
        """Cancel every trial, and end after the last."""
        if not self._is_closing:
            self._is_closing = True
            self._selector.unregister(self._channel)
        for one in self._running.values():
            one.stop()

    def _start(self, order: dict[str, Any], run: Callable[..., Any]) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                enter(order, parent, [writer, *(one.go for one in self._running.values())])
                asyncio.run(run(order, self.send, reader))
                code = 0
            except asyncio.CancelledError:
                code = 0
            except BaseException:  # this is the outermost frame of the process
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(reader)
        one = self._running[order["trial"]] = Running(pid, writer, order)
        if self._is_closing:
            one.stop()
        self._selector.register(one.pidfd, selectors.EVENT_READ, order["trial"])

    def _end(self, trial: int) -> None:
        one = self._running.pop(trial)
        self._selector.unregister(one.pidfd)
        code = one.reap()
        if code and not one.order.get("is_sweep"):  # it could not take its environment down
            self._start({**one.order, "is_sweep": True, "code": code}, sweep)
            return
        self.send(event="over", trial=trial, code=one.order.get("code", code))


def enter(order: dict[str, Any], parent: int, fds: list[int]) -> None:
    """Become the process of one trial."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise ProcessLookupError("the trial host has ended")
    for fd in fds:
        os.close(fd)
    log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.environ.update(order["environ"])


async def run_trial(order: dict[str, Any], send: Callable[..., None], go: int) -> None:
    """One trial from its start to its result, which is an error where Harbor cannot make one of it. Cancelled by SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    hooks = Hooks(order["trial"], send, go)
    try:
        said = await result_of(order, hooks)
    except Exception as error:  # whatever Harbor raises is what became of the trial
        traceback.print_exc()
        said = {"rewards": None, "error": type(error).__name__, "message": str(error)[-SAID_CHARS:]}
    send(event="result", trial=order["trial"], is_verified=hooks.is_verified, **said)


async def result_of(order: dict[str, Any], hooks: Hooks) -> dict[str, Any]:
    """Run it; what came of it."""
    from harbor import Trial, TrialConfig, TrialEvent

    trial = await Trial.create(TrialConfig.model_validate(order["config"]))
    trial.add_hook(TrialEvent.AGENT_START, hooks.agent_start)
    trial.add_hook(TrialEvent.AGENT_END, hooks.agent_end)
    trial.add_hook(TrialEvent.VERIFICATION_START, hooks.verification_start)
    result = await trial.run()
    error = result.exception_info
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    if len(json.dumps(rewards)) > SAID_CHARS:
        raise ValueError(f"rewards of more than {SAID_CHARS} characters")
    name, message = (error.exception_type, error.exception_message) if error is not None else ("", "")
    return {"rewards": rewards, "error": name, "message": message[-SAID_CHARS:]}


class Hooks:
    """Tells of a trial's phases, and lets it wait between them."""

    def __init__(self, trial: int, send: Callable[..., None], go: int) -> None:
        self._trial, self._send, self._go = trial, send, go
        self.is_verified = False

    async def agent_start(self, event: object) -> None:
        await self._ask(event="agent-start")

    async def agent_end(self, event: object) -> None:
        """Awaited by Harbor while what ended the agent is still on its way, and before anything is looked at."""
        error = sys.exc_info()[1]
        if isinstance(error, asyncio.CancelledError):
            return
        name = type(error).__name__ if error is not None else ""
        await self._ask(event="agent-end", error=name, message=str(error)[-SAID_CHARS:] if error is not None else "")

    async def verification_start(self, event: object) -> None:
        self.is_verified = True

    async def _ask(self, **message: object) -> None:
        loop = asyncio.get_running_loop()
        went: asyncio.Future[None] = loop.create_future()

        def heard() -> None:
            if not went.done():
                went.set_result(None)

        loop.add_reader(self._go, heard)
        try:
            self._send(trial=self._trial, **message)
            await went
            os.read(self._go, 1)
        finally:
            loop.remove_reader(self._go)


async def sweep(order: dict[str, Any], send: Callable[..., None], go: int) -> None:
    """Take down the environment of a trial whose process was killed: Harbor finds it by the name of the trial."""
    from harbor import Trial, TrialConfig

    trial = await Trial.create(TrialConfig.model_validate(order["config"]))
    await trial.agent_environment.stop(delete=True)


def main() -> None:
    host = Host(socket.socket(fileno=int(sys.argv[1])))
    wanted = json.loads(host._channel.recv(MESSAGE_BYTES) or b"null")
    if wanted is None:
        return
    try:
        version = open_harbor(wanted)
    except HarborRefuses as error:
        key, reason = error.args
        host.send(event="refused", key=key, reason=reason)
        return
    host.send(event="ready", harbor=version)
    signal.signal(signal.SIGTERM, host.close)
    host.serve()


if __name__ == "__main__":
    main()
