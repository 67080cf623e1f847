"""Transfer over TCP: a block server in a thread of the owner's process. Needs nothing but a socket.

One-sided from where the reader and the owner stand: the owner's own threads take no part in a read. Reading is

    reader  -> length u32, msgpack Wanted
    server  -> status u8 (OK, or STALE with length u32 and the reason), the bytes of every region in order, status u8

The second status tells whether version, incarnation or bytes changed while they were sent. Exposures are named by 128 random
bits, so that only those who were told of one can read it; without `[tls]` the bytes are not encrypted.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Mapping

import msgspec
import numpy as np

from qwengyre.core.errors import StaleRead, TransferError, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.doorway import shut
from qwengyre.transfer.api import Exposure, Pieces
from qwengyre.transfer.layout import as_bytes, copy_pieces, destinations, lay_out, pieces_of, views, whole_arrays

log = logging.getLogger(__name__)
OK, STALE = b"\0", b"\1"
LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 1 << 20  # tens of thousands of pieces fit
MAX_READERS = 64
"""Reads that are served at once; others wait their turn."""
MAX_SILENT = 128
"""Connections without a request. With more, the oldest is closed."""
ASK_DEADLINE_S = 10.0
"""Longest wait for the next bytes of a request."""


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a reader asks for."""

    name: str
    incarnation: int
    version: int
    pieces: list[tuple[int, int]]
    """(offset, bytes)"""


class _Segment:
    """Exposed memory with the state that fences readers."""

    def __init__(self, num_bytes: int, *, version: int, incarnation: int):
        self.memory = np.zeros(num_bytes, np.uint8).data
        self.incarnation, self.version, self.sequence, self.is_released = incarnation, version, 1, False

    def why_stale(self, wanted: ReadRequest) -> str | None:
        if self.is_released:
            return "was released"
        if (self.incarnation, self.version) != (wanted.incarnation, wanted.version):
            return f"holds version {self.version} of incarnation {self.incarnation}, not {wanted.version} of {wanted.incarnation}"
        return "is being written" if self.sequence % 2 else None


class TcpTransport:
    """Transport over TCP. Thread-safe; an owner's `buffers` belong to one writer.

    Listens on `host` from construction on. `deadline_s` bounds every wait of a reader and of the server for a reader.
    """

    def __init__(self, host: str = "127.0.0.1", *, deadline_s: float = 30.0):
        self._deadline_s = deadline_s
        self._tls = tls.used()
        self._segments: dict[str, _Segment] = {}
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        self._silent: dict[socket.socket, None] = {}
        """Connections that have not asked for anything yet, in the order in which they came."""
        self._lock = threading.Lock()
        self.bytes_sent = 0
        """Of exposures, to all readers."""
        try:
            self._listener = socket.create_server((host, 0), backlog=MAX_READERS)
        except OSError as error:
            raise TransferError(f"cannot listen on {host}: {error.strerror}") from error
        self._address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="tcp-transport", daemon=True).start()

    def expose(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        exposure = self.reserve(arrays, version=version, incarnation=incarnation)
        for name, view in self.buffers(exposure).items():
            copy_pieces(view, arrays[name])
        return self.republish(exposure, version=version)

    def reserve(self, arrays: Mapping[str, Pieces], *, version: int, incarnation: int) -> Exposure:
        regions, num_bytes = lay_out(arrays)
        name = secrets.token_hex(16)
        self._segments[name] = _Segment(num_bytes, version=version, incarnation=incarnation)
        return Exposure("tcp", f"{self._address}/{name}", regions, version, incarnation, num_bytes)

    def buffers(self, exposure: Exposure) -> dict[str, np.ndarray]:
        return views(exposure.regions, self._own(exposure).memory)

    def begin_write(self, exposure: Exposure) -> None:
        self._own(exposure).sequence |= 1

    def republish(self, exposure: Exposure, *, version: int) -> Exposure:
        segment = self._own(exposure)
        segment.version = version
        segment.sequence = (segment.sequence | 1) + 1
        return msgspec.structs.replace(exposure, version=version)

    def read(self, exposure: Exposure, into: Mapping[str, Pieces] | None = None) -> dict[str, np.ndarray]:
        targets = destinations(exposure, into)
        address, _, name = exposure.location.rpartition("/")
        host, _, port = address.rpartition(":")
        pieces = [(region.offset, region.num_bytes) for region in targets]
        request = msgspec.msgpack.encode(ReadRequest(name, exposure.incarnation, exposure.version, pieces))
        try:
            with _connect(host, int(port), self._deadline_s, self._tls) as connection:
                connection.sendall(LENGTH.pack(len(request)) + request)
                _check_status(connection, exposure)
                for value in targets.values():
                    for piece in pieces_of(value):
                        _receive(connection, as_bytes(piece))
                _check_status(connection, exposure)
        except WireError as error:
            raise TransferError(f"{address} cannot be read: {error}") from error
        except TimeoutError as error:
            raise TransferError(f"{address} did not send within {self._deadline_s} s") from error
        except OSError as error:
            raise TransferError(f"{address} cannot be read: {error}") from error
        return whole_arrays(targets)

    def view(self, exposure: Exposure) -> None:
        """Never: the bytes lie elsewhere."""

    def release(self, exposure: Exposure) -> None:
        segment = self._segments.pop(_name(exposure), None)
        if segment is not None:
            segment.is_released = True

    def close(self) -> None:
        for segment in self._segments.values():
            segment.is_released = True
        self._segments.clear()
        shut(self._listener)

    def _own(self, exposure: Exposure) -> _Segment:
        try:
            return self._segments[_name(exposure)]
        except KeyError:
            raise TransferError(f"{exposure.location} is not exposed by this process") from None

    def _accept(self) -> None:
        """Nobody is waited for here: a reader asks within a round trip, a stranger may never."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._tls is not None:  # greeted by its own thread: nobody is waited for here
                try:
                    connection = self._tls.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError):  # it has ended already
                    connection.close()
                    continue
            with self._lock:
                self._silent[connection] = None
                oldest = next(iter(self._silent)) if len(self._silent) > MAX_SILENT else None
            if oldest is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(connection,), name="tcp-transport-read", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(min(ASK_DEADLINE_S, self._deadline_s))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wanted = self._hear(connection)
                connection.settimeout(self._deadline_s)
                if self._readers.acquire(timeout=self._deadline_s):
                    try:
                        self._answer(connection, wanted)
                    finally:
                        self._readers.release()
        except ssl.SSLError as error:
            log.warning("read_not_served", extra={"reason": tls.in_words(error)})
        except (OSError, TransferError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("read_not_served", extra={"reason": str(error)})

    def _hear(self, connection: socket.socket) -> ReadRequest:
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            header = bytearray(LENGTH.size)
            _receive(connection, memoryview(header))
            (size,) = LENGTH.unpack(header)
            if size > MAX_REQUEST_BYTES:
                raise TransferError(f"a request of {size} bytes")
            body = bytearray(size)
            _receive(connection, memoryview(body))
            return msgspec.msgpack.decode(body, type=ReadRequest)
        finally:
            with self._lock:
                del self._silent[connection]

    def _answer(self, connection: socket.socket, wanted: ReadRequest) -> None:
        segment = self._segments.get(wanted.name)
        before = segment.sequence if segment is not None else 0
        reason = "was released" if segment is None else segment.why_stale(wanted)
        if segment is None or reason is not None:
            _send_stale(connection, reason)
            return
        connection.sendall(OK)
        for offset, num_bytes in wanted.pieces:
            if offset < 0 or num_bytes < 0 or offset + num_bytes > len(segment.memory):
                raise TransferError(f"a read of {num_bytes} bytes at {offset} of {len(segment.memory)}")
            connection.sendall(segment.memory[offset : offset + num_bytes])
            with self._lock:
                self.bytes_sent += num_bytes
        if segment.why_stale(wanted) is None and segment.sequence == before:
            connection.sendall(OK)
        else:
            _send_stale(connection, "was rewritten during the read")


def _connect(host: str, port: int, timeout_s: float, contexts: tls.Contexts | None) -> socket.socket:
    """Raises WireError, OSError."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    if contexts is None:
        return connection
    try:
        return tls.wrapped(connection, contexts, is_server=False)
    except BaseException:
        connection.close()
        raise


def _name(exposure: Exposure) -> str:
    return exposure.location.rpartition("/")[2]


def _send_stale(connection: socket.socket, reason: str | None) -> None:
    text = (reason or "").encode()
    connection.sendall(STALE + LENGTH.pack(len(text)) + text)


def _check_status(connection: socket.socket, exposure: Exposure) -> None:
    status = bytearray(1)
    _receive(connection, memoryview(status))
    if status == OK:
        return
    header = bytearray(LENGTH.size)
    _receive(connection, memoryview(header))
    reason = bytearray(min(LENGTH.unpack(header)[0], MAX_REQUEST_BYTES))
    _receive(connection, memoryview(reason))
    raise StaleRead(f"{exposure.location.partition('/')[0]}: the exposure {reason.decode(errors='replace')}")


def _receive(connection: socket.socket, target: memoryview) -> None:
    done = 0
    while done < len(target):
        num_read = tls.received(connection, target[done:])
        if num_read == 0:
            raise TransferError(f"the connection ended after {done} of {len(target)} bytes")
        done += num_read
