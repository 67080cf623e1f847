"""The gateway as a process: two listeners, one journal, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from pathlib import Path

import msgspec

from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.engines.api import Serving
from qwengyre.engines.remote import RemoteEngine
from qwengyre.gateway.app import HarnessApp
from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.gateway.control import Connect, Control
from qwengyre.gateway.control_api import AddServer
from qwengyre.gateway.gateway import Gateway, open_journal
from qwengyre.gateway.keys import load_secret
from qwengyre.gateway.listener import HttpServer, allow_open_files, tcp_listener, tls_context, unix_listener
from qwengyre.gateway.rendering import Rendering
from qwengyre.rpc.processes import announce
from qwengyre.rpc.server import RpcServer, Service

log = logging.getLogger(__name__)


class Listening(msgspec.Struct, frozen=True):
    """Where the gateway listens; also the ready file."""

    pid: int
    port: int | None
    harness_socket: str | None
    control_socket: str


class GatewayServer:
    """Use as an async context manager: inside it, both listeners answer."""

    def __init__(self, config: GatewayProcessConfig, *, rendering: Rendering | None = None, connect: Connect | None = None):
        self.config = config
        self.stop = asyncio.Event()
        self._tls = tls_context(config.gateway)
        rendering = rendering or Rendering.from_folder(config.model, config.gateway.renderer)
        self._journal = open_journal(config.journal, config.gateway)
        if self._journal.cut is not None:
            log.warning("journal_cut", extra={"cut": str(self._journal.cut)})
        secret = load_secret(config.secret_file)
        self.gateway = Gateway(
            config.gateway, rendering, self._journal, secret, time.time, read_harness_rules(config.harness_rules)
        )
        self._harness = HarnessApp(self.gateway)
        self._http: list[HttpServer] = []
        control = Control(self.gateway, connect or connect_engine)
        self._control = RpcServer(None, lambda: Service(control.handlers()))
        self._stack = contextlib.AsyncExitStack()
        self.listening: Listening | None = None

    async def __aenter__(self) -> GatewayServer:
        num_records = self.gateway.replay(self.config.number)
        log.info("journal_replayed", extra={"num_records": num_records, "num_open": len(self.gateway.executions)})
        config = self.config
        port = None
        if config.port is not None:
            listener = tcp_listener(config.gateway.host, config.port)
            port = listener.getsockname()[1]
            self._http.append(HttpServer(self._harness, listener, self._tls))
        if config.harness_socket is not None:
            self._http.append(HttpServer(self._harness, unix_listener(config.harness_socket, 0o666)))
        control = unix_listener(config.control_socket, 0o600)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._background = [
            tasks.create_task(self.gateway.serve(self.stop)),
            tasks.create_task(self._harness.keep_alive(config.gateway.keep_alive_s)),
        ]
        for http in self._http:
            await http.begin()
            self._background.append(tasks.create_task(http.main_loop()))
        await self._control.listen_on(control)
        self.listening = Listening(
            pid=os.getpid(), port=port, harness_socket=config.harness_socket, control_socket=config.control_socket
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self.stop.set()
        await self._control.close()
        for http in self._http:
            await http.end()
        for task in self._background[1:]:
            task.cancel()
        await self._stack.aclose()
        for name in (self.config.harness_socket, self.config.control_socket):
            if name is not None:
                Path(name).unlink(missing_ok=True)
        self._journal.close()


async def serve(config: GatewayProcessConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError, JournalError."""
    allow_open_files()
    server = GatewayServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    gc.freeze()  # modules and the tokenizer stay: to look through them again and again for garbage costs every stream
    async with server:
        if config.ready_file is not None:
            announce(Path(config.ready_file), msgspec.json.encode(server.listening))
        log.info("gateway_ready", extra=msgspec.to_builtins(server.listening))
        await server.stop.wait()
        log.info("gateway_stops", extra=msgspec.to_builtins(server.gateway.stats))
    if server.gateway.broken is not None:
        raise server.gateway.broken


def connect_engine(asked: AddServer) -> Serving:
    return RemoteEngine(asked.address, secret=asked.secret)
