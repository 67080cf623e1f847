"""TLS between nodes: who is on the path reads nothing and changes nothing, and whoever has no certificate of the run hears what to do."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import ConfigError, TransferError, Unreachable, WireError
from qwengyre.rpc import tls
from qwengyre.rpc.address import parse_address
from qwengyre.rpc.client import Client
from qwengyre.rpc.doorway import shut
from qwengyre.rpc.server import RpcServer, Service
from qwengyre.rpc.store import KeyStore, StoreClient
from qwengyre.rpc.tls import TlsConfig, using
from qwengyre.transfer.tcp import TcpTransport

FILES = Path(__file__).parents[2] / "certificates"
SECRET = b"secret"
TIMEOUT_S = 60.0
NONE = TlsConfig()
WORDS = "w" * 64


def node(who: str, ca: str = "") -> TlsConfig:
    return TlsConfig(
        cert=str(FILES / f"{who}-node.pem"), key=str(FILES / f"{who}-node.key"), ca=str(FILES / f"{ca or who}-ca.pem")
    )


RUN, OTHER = node("run"), node("other")
INTRUDER = msgspec.structs.replace(OTHER, ca=RUN.ca)
"""Knows the run's CA, and has a certificate of another."""


def contexts_of(config: TlsConfig) -> tls.Contexts | None:
    """As `Contexts.load`, for one that would not take itself."""
    protocols = tls.ssl.PROTOCOL_TLS_SERVER, tls.ssl.PROTOCOL_TLS_CLIENT
    return tls.Contexts(config, *(tls._context(config, protocol) for protocol in protocols)) if config.is_wanted else None


class Say(msgspec.Struct, frozen=True, tag=True):
    text: str


class Man:
    """In the middle of a connection. He keeps what passes, and flips a bit of each thing that the server says from the `flip_from`-th on.

    He adds `slipped` to the first thing that the client says. With `lag_s` he lets things come together before he passes them on.
    """

    def __init__(self, address: str, flip_from: int | None = None, slipped: bytes = b"", lag_s: float = 0.0) -> None:
        self.heard, self._flip_from, self._slipped, self._lag_s = bytearray(), flip_from, slipped, lag_s
        where = parse_address(address)
        self._there = where.host, where.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._passing: list[threading.Thread] = []
        self._standing = threading.Thread(target=self._stand, daemon=True)
        self._standing.start()

    def _stand(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                self._passing.append(threading.Thread(target=self._join, args=(ours,), daemon=True))
                self._passing[-1].start()

    def _join(self, ours: socket.socket) -> None:
        """Pass on what both ends say until one has ended."""
        with ours, suppress(OSError), socket.create_connection(self._there) as theirs:
            back = threading.Thread(target=self._pass, args=(theirs, ours, self._flip_from), daemon=True)
            back.start()
            self._pass(ours, theirs, None, self._slipped)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, flip_from: int | None, slipped: bytes = b"") -> None:
        number = 0
        with suppress(OSError):
            while data := self._next(source):
                self.heard += data
                data, slipped = data + slipped, b""
                if flip_from is not None and number >= flip_from:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                number += 1
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _next(self, source: socket.socket) -> bytes:
        time.sleep(self._lag_s)
        return source.recv(1 << 16)

    def close(self) -> None:
        """Every connection has an end that is closed by now."""
        shut(self._listener)
        self._standing.join()
        for passing in self._passing:
            passing.join()


@contextmanager
def man_at(address: str, flip_from: int | None = None, slipped: bytes = b"", lag_s: float = 0.0) -> Iterator[Man]:
    man = Man(address, flip_from, slipped, lag_s)
    try:
        yield man
    finally:
        man.close()


async def ask(
    server_has: TlsConfig,
    client_has: TlsConfig,
    *,
    flip_from: int | None = None,
    times: int = 1,
    slipped: bytes = b"",
    lag_s: float = 0.0,
) -> tuple[str, bytes]:
    """What a client is told over a man in the middle, and what he heard. Raises what the client raises."""

    async def say(asked: Say) -> Say:
        return Say(asked.text + "!")

    with using(NONE):
        server = RpcServer(SECRET, lambda: Service({Say: say}))
        server.contexts = contexts_of(server_has)
        with man_at(await server.listen("tcp://127.0.0.1:0"), flip_from, slipped, lag_s) as man:
            client = Client(f"tcp://127.0.0.1:{man.port}", SECRET)
            client._tls = contexts_of(client_has)
            try:
                for _ in range(times):
                    told = (await client.call(Say(WORDS), Say, TIMEOUT_S)).text
                return told, bytes(man.heard)
            finally:
                client.close()
                await server.close()
                assert not server.peers, "nobody is kept who was refused"


async def test_what_passes_on_the_path_is_read_without_tls_and_not_with_it():
    told, heard = await ask(NONE, NONE)
    assert told == WORDS + "!" and WORDS.encode() in heard
    told, heard = await ask(RUN, RUN, times=3)
    assert told == WORDS + "!" and WORDS.encode() not in heard and b"w" * 8 not in heard


@pytest.mark.parametrize(
    "server_has, client_has, words",
    [
        (RUN, NONE, r"the other end speaks TLS and this process does not: set the same \[tls\] on every node"),
        (NONE, RUN, r"this process speaks TLS and the other end does not: set the same \[tls\] on every node"),
        (RUN, OTHER, r"its certificate is not of the CA in tls.ca .*give every node one of the same CA"),
        (RUN, INTRUDER, r"does not take this node's certificate.*every node (one|a certificate) of the same CA"),
        (INTRUDER, RUN, r"its certificate is not of the CA in tls.ca .*give every node one of the same CA"),
    ],
)
async def test_who_speaks_no_tls_or_has_another_ca_is_refused_with_what_to_do(server_has, client_has, words):
    with pytest.raises(Unreachable, match=words):
        await ask(server_has, client_has)


async def test_bits_that_are_flipped_on_the_path_end_the_connection():
    """Of what the server says, the first two are its hello: with the third, the handshake, or later ones flipped."""
    for flip_from in (2, 3, 4):
        with pytest.raises(Unreachable) as raised:
            await ask(RUN, RUN, flip_from=flip_from, times=4)
        assert WORDS not in str(raised.value)


async def test_a_hello_that_was_changed_to_go_without_tls_goes_nowhere():
    """The man in the middle tells each end that the other speaks no TLS."""
    with pytest.raises(Unreachable):
        await ask(RUN, RUN, flip_from=0)


async def test_a_request_that_comes_with_the_last_bytes_of_the_handshake_is_answered():
    told, heard = await ask(RUN, RUN, lag_s=0.05)
    assert told == WORDS + "!" and WORDS.encode() not in heard


@pytest.mark.parametrize("slipped", [b"\0", b"\0" * 15, b"\xff" * 16, b"\0" * 40], ids=len)
async def test_bytes_that_were_slipped_in_before_tls_never_count_as_what_tls_tells(slipped):
    """A part of a frame, or more, behind the client's hello."""
    with pytest.raises(Unreachable, match=r"or went away|without TLS"):
        await ask(RUN, RUN, slipped=slipped)


@contextmanager
def client_at(port: int) -> Iterator[StoreClient]:
    with closing(StoreClient(f"tcp://127.0.0.1:{port}", SECRET, TIMEOUT_S)) as client:
        yield client


def test_a_store_between_threads_speaks_tls():
    with using(RUN):
        store = KeyStore("127.0.0.1", SECRET)
    try:
        with man_at(store.address) as man, using(RUN), client_at(man.port) as client:
            client.set("key", WORDS.encode())
            assert client.wait(["key"]) == (WORDS.encode(),) and b"w" * 8 not in man.heard
        with using(OTHER), pytest.raises(Unreachable, match=r"not of the CA in tls\.ca"):
            StoreClient(store.address, SECRET, TIMEOUT_S)
        with using(NONE), pytest.raises(Unreachable, match="the other end speaks TLS"):
            StoreClient(store.address, SECRET, TIMEOUT_S)
        refused = pytest.raises((Unreachable, OSError, WireError))
        with man_at(store.address, 3) as man, using(RUN), refused, client_at(man.port) as client:
            client.set("key", b"x")
    finally:
        store.close()


def test_weights_are_read_over_tls_by_who_has_a_certificate_and_nobody_else():
    arrays = {"a": np.arange(400_000, dtype=np.float32)}  # many things said, however they come together
    with using(RUN):
        owner, reader = TcpTransport(), TcpTransport()
    transports = [owner, reader]
    try:
        exposed = owner.expose(arrays, version=1, incarnation=0)
        assert np.array_equal(reader.read(exposed)["a"], arrays["a"])
        for config, words in ((OTHER, "not of the CA in tls.ca"), (NONE, "ended after|cannot be read|did not send")):
            with using(config):
                transports.append(TcpTransport(deadline_s=2.0))
            with pytest.raises(TransferError, match=words):
                transports[-1].read(exposed)
        with man_at(f"tcp://{exposed.location.rpartition('/')[0]}", 5) as man:
            moved = msgspec.structs.replace(exposed, location=f"127.0.0.1:{man.port}/{exposed.location.rpartition('/')[2]}")
            with pytest.raises(TransferError, match="changed on its way"):
                reader.read(moved)
            assert arrays["a"].tobytes()[4000:4064] not in man.heard
    finally:
        for transport in transports:
            transport.close()


@pytest.mark.parametrize(
    "config, key, words",
    [
        (node("run", "other"), "tls.cert", "not one of .*other-ca.pem that other nodes would take.*Make one with that CA"),
        (msgspec.structs.replace(RUN, key=OTHER.key), "tls.cert", "no certificate and its key in PEM"),
        (msgspec.structs.replace(RUN, ca=RUN.key), "tls.ca", "no certificate in PEM"),
        (msgspec.structs.replace(RUN, key="no/such.key"), "tls.key", "cannot read this file"),
    ],
)
def test_files_that_no_node_would_take_are_named_at_load(config, key, words):
    with pytest.raises(ConfigError, match=words) as raised:
        tls.use(config)
    assert raised.value.key == key and raised.value.file and tls.used() is None


def test_all_three_files_or_none():
    with pytest.raises(ValueError, match="key and ca must be given, too"):
        TlsConfig(cert="a")
    assert not NONE.is_wanted and asyncio.run(ask(NONE, NONE))[0] == WORDS + "!"
