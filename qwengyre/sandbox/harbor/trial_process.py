"""The controller's end of a trial host: its process, and the messages of each trial of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError, HarnessLost, SandboxError
from qwengyre.rpc.logs import log_tail
from qwengyre.sandbox.harbor import trial_host
from qwengyre.sandbox.harbor.config import HarborConfig
from qwengyre.sandbox.harbor.trials import agent_of, environment_of
from qwengyre.sandbox.harness import RESERVED
from qwengyre.sandbox.process import Process

OPEN_TIMEOUT_S: Final = 120.0
"""Importing Harbor and an environment's SDK takes seconds, or a minute on a cold disk."""
CLOSE_GRACE_S: Final = trial_host.STOP_GRACE_S + 30.0
"""Every trial of it is cancelled at once."""
QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Harbor's model library fetches no prices at a start, in a thread that would be lost in every fork."""


class TrialHost:
    """One life of a trial host. `open` it, and `close` it."""

    def __init__(self, config: HarborConfig, log: Path):
        self._config, self._log = config, log
        self._numbers = itertools.count(1)
        self._said: dict[int, asyncio.Queue[dict[str, Any] | None]] = {}
        """Of each live trial; None is said when this process is gone."""
        self.version = ""
        self.is_lost = False

    async def open(self) -> None:
        """Raises ConfigError with the key of what Harbor refuses, SandboxError when the process ends by itself."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self._process = self._start(theirs.fileno())
        wanted = {"agent": agent_of(self._config), "environment": environment_of(self._config)}
        self._send(wanted)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                said = await self._receive()
        except TimeoutError:
            said = None
        if said is None or said["event"] != "ready":
            await self.close()
        if said is None:
            raise SandboxError(f"{self._config.python} did not start Harbor:\n{log_tail(self._log)}".strip())
        if said["event"] == "refused":
            raise ConfigError(said["reason"], key=f"sandbox.harbor.{said['key']}")
        self.version = said["harbor"]
        asyncio.get_running_loop().add_reader(self._channel, self._hear)

    def _start(self, channel: int) -> Process:
        command = [str(self._config.python), "-P", trial_host.__file__, str(channel)]
        env = {name: value for name, value in os.environ.items() if name not in RESERVED} | QUIET
        env["PYTHONPATH"] = os.pathsep.join(self._config.path)
        env["PATH"] = os.pathsep.join(
            (os.path.dirname(self._config.python), env.get("PATH", os.defpath))
        )  # as if it were activated
        try:
            with open(self._log, "ab") as log:
                popen = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[channel], start_new_session=True
                )
        except OSError as error:
            self._channel.close()
            message = f"{self._config.python} cannot be run: {error.strerror}"
            raise ConfigError(message, key="sandbox.harbor.python") from error
        return Process(popen, in_pid_namespace=False)

    async def _receive(self) -> dict[str, Any] | None:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._channel, trial_host.MESSAGE_BYTES)
        except OSError:
            return None
        return dict(json.loads(data)) if data else None

    def _hear(self) -> None:
        try:
            data = self._channel.recv(trial_host.MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        said = json.loads(data)  # which reads NaN, as a verifier may give it
        if (queue := self._said.get(said["trial"])) is not None:
            queue.put_nowait(said)

    def _lose(self) -> None:
        """This process is gone, or is about to be: nothing more will be heard of its trials."""
        if not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().remove_reader(self._channel)
            for queue in self._said.values():
                queue.put_nowait(None)

    def _send(self, message: Mapping[str, Any]) -> None:
        """Raises HarnessLost when the process is gone, SandboxError for what is too long for it."""
        data = msgspec.json.encode(message)
        if len(data) > trial_host.MESSAGE_BYTES:
            raise SandboxError(
                f"a trial cannot be described in {trial_host.MESSAGE_BYTES:,} bytes: shorten what sandbox.harbor gives it"
            )
        try:
            self._channel.send(data)
        except OSError as error:
            raise HarnessLost(f"the trial host is gone: {error.strerror}") from error

    @contextlib.asynccontextmanager
    async def trial(self, config: dict[str, Any], environ: dict[str, str], log: Path) -> AsyncIterator[LiveTrial]:
        """A running trial; at the end it is stopped, and its process and environment are gone. Raises HarnessLost."""
        number = next(self._numbers)
        queue = self._said[number] = asyncio.Queue()
        trial = LiveTrial(self, number, queue, log)
        try:
            self._send({"op": "start", "trial": number, "config": config, "environ": environ, "log": str(log)})
            yield trial
        finally:
            await asyncio.shield(asyncio.ensure_future(trial.end()))
            del self._said[number]

    async def close(self) -> None:
        """Cancel every trial and end the process; its trials are lost."""
        if self.version:
            self._lose()
        self._channel.close()
        if await self._process.wait(CLOSE_GRACE_S) is None:
            await self._process.kill()


class LiveTrial:
    """One trial, as it goes on."""

    def __init__(self, host: TrialHost, number: int, said: asyncio.Queue[dict[str, Any] | None], log: Path):
        self._host, self._number, self._said, self.log = host, number, said, log
        self._is_over = False

    async def hear(self) -> dict[str, Any]:
        """The next thing that the trial says. Raises HarnessLost when its process, or the trial host's, has ended before it was done."""
        said = await self._said.get() if not self._is_over else None
        if said is None:
            self._is_over = True
            raise HarnessLost("the trial host ended while the trial ran")
        if said["event"] == "over":
            self._is_over = True
            raise HarnessLost(f"the process of the trial ended with {said['code']}\n{log_tail(self.log)}".strip())
        return said

    def go(self) -> None:
        """Let it go on from where it waits. Raises HarnessLost."""
        self._host._send({"op": "go", "trial": self._number})

    async def end(self) -> None:
        """Stop it if it is still running, and return once it is gone."""
        if self._is_over or self._host.is_lost:
            return
        with contextlib.suppress(HarnessLost):
            self._host._send({"op": "stop", "trial": self._number})
            while True:
                await self.hear()
