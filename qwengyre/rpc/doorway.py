"""Let peers in that know the secret, from threads that block. Strangers neither hold this up nor cost more than a socket each."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final

from qwengyre.core.errors import ConfigError, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.address import TcpAddress
from qwengyre.rpc.channel import Channel
from qwengyre.rpc.connection import HELLO_DEADLINE_S
from qwengyre.rpc.hello import NONCE_BYTES, ServerHello
from qwengyre.rpc.server import MAX_STRANGERS

log = logging.getLogger(__name__)
BACKLOG: Final = 128


class Doorway:
    """Listens on `host`; `welcome` is called, in a thread of its own, with the channel of every peer that has proved itself."""

    def __init__(self, host: str, secret: bytes, welcome: Callable[[Channel], None]) -> None:
        """Raises ConfigError when it cannot listen."""
        self._secret, self._welcome = secret, welcome
        self._tls = tls.used()
        try:
            self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}: {error.strerror}") from error
        self.address = TcpAddress(host, self._listener.getsockname()[1])
        self._strangers: dict[Channel, None] = {}
        """In the order in which they came."""
        self._lock = threading.Lock()
        threading.Thread(target=self._let_in, name="doorway", daemon=True).start()

    def close(self) -> None:
        """Nobody comes in any more; who is in stays."""
        shut(self._listener)

    def _let_in(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection)
            channel.set_deadline(HELLO_DEADLINE_S)
            with self._lock:
                self._strangers[channel] = None
                oldest = next(iter(self._strangers)) if len(self._strangers) > MAX_STRANGERS else None
            if oldest is not None:
                oldest.close()
            threading.Thread(target=self._greet, args=(channel,), name="doorway-peer", daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            channel.shake_hands(ServerHello(self._secret, secrets.token_bytes(NONCE_BYTES), tls=self._tls is not None), self._tls)
        except (OSError, WireError) as error:
            log.warning("stranger_turned_away", extra={"reason": str(error) or type(error).__name__})
            channel.close()
            return
        finally:
            with self._lock:
                del self._strangers[channel]
        channel.set_deadline(None)
        self._welcome(channel)


def shut(listener: socket.socket) -> None:
    """Close a listening socket on which another thread accepts: that thread is woken, which closing alone does not do."""
    with contextlib.suppress(OSError):  # it is closed already
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
