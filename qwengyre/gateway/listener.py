"""Listening sockets and the HTTP server on them: what a client can cost before its request is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.config import GatewayConfig

MAX_HEAD_BYTES = 128 * 1024  # far above what clients send; a head is held in memory whole
HEAD_DEADLINE_S = 60.0
"""Longest time between the first and the last byte of a request's head; then the connection is closed."""
IDLE_DEADLINE_S = 600
"""Longest time of a connection without a request, before the first one and between two: clients connect early, and keep connections."""
BACKLOG = 4096  # connections that wait to be accepted: hundreds of harnesses may call in one moment


class PatientProtocol(H11Protocol):
    """uvicorn's, for clients that are slow, but not for ever: a request whose head does not come to its end holds no socket, and neither
    does a connection without one."""

    _deadline: asyncio.TimerHandle | None = None
    _is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(IDLE_DEADLINE_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_in_head = self.conn.their_state is h11.IDLE
        if is_in_head and not self._is_in_head:
            self._end_deadline()
            self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)
        elif not is_in_head:
            self._end_deadline()
        self._is_in_head = is_in_head

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: the process has one owner. Connections are bounded in head, time and backlog."""

    def __init__(self, app: Callable[..., Awaitable[None]], listener: socket.socket, tls: ssl.SSLContext | None = None):
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                http=PatientProtocol,
                ws="none",
                loop="none",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=IDLE_DEADLINE_S,
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
            )
        )
        self._sockets, self._tls = [listener], tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def begin(self) -> None:
        self.config.load()
        self.config.ssl = self._tls
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=self._sockets)

    async def end(self) -> None:
        self.should_exit = True
        await self.shutdown(sockets=self._sockets)


def allow_open_files() -> None:
    """As many sockets as this user may have: the usual soft limit is below a thousand harnesses."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """What the TCP listener of `config` encrypts with, None for plain HTTP. Raises ConfigError for a certificate that cannot be served."""
    if not config.tls_certificate:
        return None
    for key, name in (("tls_certificate", config.tls_certificate), ("tls_key", config.tls_key)):
        try:
            mode = os.stat(name).st_mode
            Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", key=f"gateway.{key}", file=name) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError("others can read this key: chmod 600 it", key="gateway.tls_key", file=config.tls_key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:  # a key with a password would be asked for at a terminal
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
        raise ConfigError(
            f"no PEM certificate with its key, without a password ({reason})",
            key="gateway.tls_certificate",
            file=config.tls_certificate,
        ) from error
    return context


def tcp_listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports go from 0 to 65535"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another or 0", key="gateway.port") from error
    return listener


def unix_listener(path: str, mode: int) -> socket.socket:
    """Listen on a Unix socket; a file that a killed gateway left there is replaced, one in use is not."""
    if _is_answered(path):
        raise ConfigError(f"another process listens on {path}", key="control_socket")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; is the path over 100 characters?") from error
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
