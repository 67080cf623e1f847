"""Requests and replies between two ends, with strangers about: on an event loop and between threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import CellFailed, ConfigError, MessageTooLarge, Unreachable, WireError
from qwengyre.rpc import connection as wire
from qwengyre.rpc.address import parse_address
from qwengyre.rpc.channel import Channel
from qwengyre.rpc.client import Client
from qwengyre.rpc.doorway import Doorway
from qwengyre.rpc.frames import HEADER, MAX_MESSAGE_BYTES
from qwengyre.rpc.hello import ClientHello
from qwengyre.rpc.refusal import Refused
from qwengyre.rpc.server import MAX_STRANGERS, RpcServer, Service

SECRET = b"secret"
TIMEOUT_S = 60.0
"""Far beyond what a busy machine needs."""


class Double(msgspec.Struct, frozen=True, tag=True):
    number: int


class Doubled(msgspec.Struct, frozen=True, tag=True):
    number: int
    padding: bytes = b""


class Fail(msgspec.Struct, frozen=True, tag=True):
    as_bug: bool


class Wait(msgspec.Struct, frozen=True, tag=True):
    pass


class Unknown(msgspec.Struct, frozen=True, tag=True):
    pass


class Note(msgspec.Struct, frozen=True, tag=True):
    """Said without being asked."""

    text: str


class Table(Service):
    """What the server of these tests does."""

    messages = (Note,)

    def __init__(self) -> None:
        super().__init__({Double: self.double, Fail: self.fail, Wait: self.wait})
        self.heard: list[str] = []
        self.is_waiting, self.go = asyncio.Event(), asyncio.Event()
        self.connection: wire.Connection | None = None

    def begin(self, connection: wire.Connection) -> None:
        self.connection = connection

    def hear(self, message: Note) -> None:
        self.heard.append(message.text)
        self.connection.send(Note(f"heard {message.text}"))

    async def double(self, request: Double) -> Doubled:
        padding = bytes(MAX_MESSAGE_BYTES) if request.number < 0 else b""
        return Doubled(2 * request.number, padding)

    async def fail(self, request: Fail) -> Doubled:
        raise ValueError("a bug") if request.as_bug else CellFailed(3, "stalled")

    async def wait(self, request: Wait) -> Doubled:
        self.is_waiting.set()
        await self.go.wait()
        return Doubled(0)


@asynccontextmanager
async def with_server(address: str = "tcp://127.0.0.1:0") -> AsyncIterator[tuple[RpcServer, Table, str]]:
    table = Table()
    server = RpcServer(None if address.startswith("unix") else SECRET, lambda: table)
    try:
        yield server, table, await server.listen(address)
    finally:
        await server.close()


async def double(client: Client, number: int = 4) -> int:
    return (await client.call(Double(number), Doubled, TIMEOUT_S)).number


async def test_a_request_has_its_typed_reply_and_many_share_a_connection():
    async with with_server() as (server, _, address):
        client = Client(address, SECRET)
        assert await asyncio.gather(*(double(client, number) for number in range(50))) == list(range(0, 100, 2))
        assert len(server.peers) == 1
        client.close()


async def test_a_refusal_arrives_as_the_error_it_is_and_the_connection_goes_on():
    async with with_server() as (server, _, address):
        client = Client(address, SECRET)
        with pytest.raises(CellFailed, match="Fail: cell 3: stalled") as raised:
            await client.call(Fail(as_bug=False), Doubled, TIMEOUT_S, said_by="Fail: ")
        assert raised.value.reason == "stalled"
        for request, words in ((Fail(as_bug=True), "Fail broke off: the log"), (Unknown(), "not a request that is known here")):
            with pytest.raises(WireError, match=words):
                await client.call(request, Doubled, TIMEOUT_S)
        with pytest.raises(WireError, match="is not a Note"):
            await client.call(Double(1), Note, TIMEOUT_S)
        assert await double(client) == 8 and len(server.peers) == 1
        client.close()


async def test_messages_that_want_no_reply_go_both_ways():
    async with with_server() as (_, table, address):
        heard: asyncio.Queue[Note] = asyncio.Queue()
        client = Client(address, SECRET, messages=(Note,), hear=heard.put_nowait)
        await client.say(Note("a"), TIMEOUT_S)
        assert await heard.get() == Note("heard a") and table.heard == ["a"]
        client.close()


async def test_a_server_that_says_what_nobody_knows_loses_the_connection():
    async with with_server() as (_, _, address):
        lost: asyncio.Queue[str] = asyncio.Queue()
        client = Client(address, SECRET, on_lost=lost.put_nowait)
        await client.say(Note("a"), TIMEOUT_S)
        assert "without being asked" in await lost.get()


async def test_a_lost_connection_ends_what_waits_on_it_at_once_and_the_next_request_connects_again():
    async with with_server() as (server, table, address):
        client = Client(address, SECRET)
        waiting = [asyncio.create_task(client.call(Wait(), Doubled, TIMEOUT_S)) for _ in range(3)]
        await table.is_waiting.wait()
        for peer in list(server.peers):
            peer.connection.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable] * 3
        assert await double(client) == 8
        client.close()


async def test_a_request_has_a_deadline_and_a_late_reply_is_nobodys():
    async with with_server() as (_, table, address):
        client = Client(address, SECRET)
        await client.connect(TIMEOUT_S)
        with pytest.raises(Unreachable, match=r"Wait was not answered within 0.01 s"):
            await client.call(Wait(), Doubled, 0.01)
        table.go.set()
        assert await double(client) == 8
        client.close()


async def test_nobody_there_is_told_with_the_address():
    async def main() -> None:
        for address in ("tcp://127.0.0.1:1", "unix:/nowhere/x.sock"):
            with pytest.raises(Unreachable, match=address):
                await Client(address, None).call(Double(1), Doubled, TIMEOUT_S)

    await main()
    with pytest.raises(Unreachable, match=r"tcp://127\.0\.0\.1:1"):
        Channel.connect(parse_address("tcp://127.0.0.1:1"), SECRET, TIMEOUT_S)


# ---------------------------------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("secret", [b"guess", b"secret "])
async def test_who_does_not_know_the_secret_is_not_served(secret: bytes):
    async with with_server() as (_, _, address):
        with pytest.raises(Unreachable):
            await Client(address, secret).call(Double(1), Doubled, TIMEOUT_S)


async def test_a_server_that_others_can_reach_needs_a_secret():
    with pytest.raises(ConfigError):
        RpcServer(b"", Table)

    with pytest.raises(ConfigError, match="needs a secret"):
        await RpcServer(None, Table).listen("tcp://127.0.0.1:0")


async def test_a_client_gives_nothing_to_whoever_took_the_address():
    said: list[bytes] = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = msgspec.msgpack.encode({"type": "Challenge", "nonce": b"n" * 32})
        writer.write(HEADER.pack(len(nonce), 0) + nonce)
        said.append(await reader.read(1000))
        welcome = msgspec.msgpack.encode({"type": "Welcome", "mac": b"m" * 32})
        writer.write(HEADER.pack(len(welcome), 0) + welcome)
        said.append(await reader.read(1000))
        writer.close()

    squatter = await asyncio.start_server(pretend, "127.0.0.1", 0)
    host, port = squatter.sockets[0].getsockname()
    with pytest.raises(Unreachable, match="server does not know the secret"):
        await Client(f"tcp://{host}:{port}", SECRET).call(Note("weights"), Doubled, TIMEOUT_S)
    assert SECRET not in b"".join(said) and b"weights" not in b"".join(said)
    squatter.close()


FIRST_WORDS = [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(MAX_MESSAGE_BYTES, 1), HEADER.pack(3, 0) + b"abc", HEADER.pack(0, 0)]


@pytest.mark.parametrize("said", FIRST_WORDS)
async def test_bytes_that_are_not_a_hello_close_that_connection_alone(said: bytes):
    async with with_server() as (_, _, address):
        friend = Client(address, SECRET)
        assert await double(friend) == 8
        reader, writer = await stranger(address)
        writer.write(said)
        await until_closed(reader)
        writer.close()
        assert await double(friend) == 8
        friend.close()


async def test_a_request_before_the_hello_is_not_heard():
    async with with_server() as (_, table, address):
        reader, writer = await stranger(address)
        note = msgspec.msgpack.encode(Note("hi"))
        writer.write(HEADER.pack(len(note), 0) + note)
        await until_closed(reader)
        writer.close()
        assert table.heard == []


async def test_strangers_cost_no_memory_however_much_they_send():
    async with with_server() as (server, _, address):
        streams = [await stranger(address) for _ in range(10)]
        for _, writer in streams:
            writer.write(HEADER.pack(64 << 20, 0) + bytes(1 << 20))
        for reader, writer in streams:
            await until_closed(reader)
            writer.close()
        assert sum(len(peer.connection._cutter._received) for peer in server.peers) < 10 * 512


async def test_many_idle_strangers_do_not_keep_a_friend_out():
    async with with_server() as (server, _, address):
        streams = [await stranger(address) for _ in range(MAX_STRANGERS + 40)]
        friend = Client(address, SECRET)
        assert await double(friend) == 8
        assert sum(not peer.connection.is_welcome for peer in server.peers) <= MAX_STRANGERS
        await until_closed(streams[0][0])
        friend.close()
        for _, writer in streams:
            writer.close()


async def test_a_stranger_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "HELLO_DEADLINE_S", 0.01)

    async with with_server() as (_, _, address):
        reader, writer = await stranger(address)
        await until_closed(reader)
        writer.close()


async def stranger(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = parse_address(address)
    return await asyncio.open_connection(where.host, where.port)


async def until_closed(reader: asyncio.StreamReader) -> None:
    """However the other side closes: it may not have read everything."""
    try:
        await reader.read()
    except ConnectionError:
        return


# ---------------------------------------------------------------------------------------------------------------- sizes


async def test_a_request_above_the_bound_is_refused_whole_and_the_next_one_is_served():
    """What arrives is refused with its number, not cut and decoded; its bytes are not kept."""

    async with with_server() as (_, table, address):
        reader, writer = await stranger(address)
        hello = ClientHello(SECRET, b"n" * 32)
        while not hello.is_over:
            if (said := hello.hear(await receive(reader))) is not None:
                send(writer, msgspec.msgpack.encode(said))
        writer.write(HEADER.pack(MAX_MESSAGE_BYTES + 1, 7))
        for size in [1 << 20] * (MAX_MESSAGE_BYTES >> 20) + [1]:
            writer.write(bytes(size))
            await writer.drain()
        refused = msgspec.msgpack.decode(await receive(reader), type=Refused)
        assert (refused.kind, refused.fields["num_bytes"]) == ("MessageTooLarge", MAX_MESSAGE_BYTES + 1)
        send(writer, msgspec.msgpack.encode(Double(4)), number=8)
        assert msgspec.msgpack.decode(await receive(reader), type=Doubled) == Doubled(8)
        assert len(table.connection._cutter._received) == 0
        writer.close()


async def test_a_reply_above_the_bound_is_refused_with_a_typed_error():
    async with with_server() as (_, _, address):
        client = Client(address, SECRET)
        with pytest.raises(MessageTooLarge, match="Doubled"):
            await double(client, -1)
        assert await double(client) == 8
        client.close()


async def test_a_request_above_the_bound_is_not_sent():
    async with with_server() as (_, _, address):
        client = Client(address, SECRET)
        with pytest.raises(MessageTooLarge, match="Note"):
            await client.call(Note("x" * MAX_MESSAGE_BYTES), Doubled, TIMEOUT_S)
        assert await double(client) == 8
        client.close()


def send(writer: asyncio.StreamWriter, body: bytes, number: int = 0) -> None:
    writer.write(HEADER.pack(len(body), number) + body)


async def receive(reader: asyncio.StreamReader) -> bytes:
    num_bytes, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(num_bytes)


# ---------------------------------------------------------------------------------------------------------------- Unix sockets


async def test_a_unix_socket_is_its_owners_alone(tmp_path: Path):
    async with with_server(f"unix:{tmp_path / 's'}") as (_, _, address):
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        client = Client(address, None)
        assert await double(client) == 8
        client.close()


# ---------------------------------------------------------------------------------------------------------------- threads


def read_until_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass


@pytest.fixture
def doorway():
    came: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    opened = Doorway("127.0.0.1", SECRET, came.put)
    opened.came = came
    yield opened
    opened.close()


def refuse(request: Fail) -> Doubled:
    raise CellFailed(3, "stalled")


def test_threads_that_block_speak_the_same_wire(doorway: Doorway):
    mine = Channel.connect(doorway.address, SECRET, TIMEOUT_S)
    theirs = doorway.came.get(timeout=TIMEOUT_S)
    handlers = {Double: lambda request: Doubled(2 * request.number), Fail: refuse}
    serving = threading.Thread(target=theirs.serve, args=(handlers,))
    serving.start()
    assert mine.call(Double(4), Doubled) == Doubled(8)
    for request, kind in ((Fail(as_bug=False), CellFailed), (Unknown(), WireError)):
        with pytest.raises(kind):
            mine.call(request, Doubled)
    with pytest.raises(MessageTooLarge):
        mine.send(Note("x" * MAX_MESSAGE_BYTES))
    mine._socket.sendall(HEADER.pack(MAX_MESSAGE_BYTES + 1, 1))
    for size in [1 << 20] * (MAX_MESSAGE_BYTES >> 20) + [1]:
        mine._socket.sendall(bytes(size))
    with pytest.raises(MessageTooLarge):
        mine.reply(Doubled)
    assert mine.call(Double(5), Doubled) == Doubled(10)
    mine.close()
    serving.join()
    theirs.close()


def test_strangers_at_a_doorway_are_turned_away_and_hold_nobody_up(doorway: Doorway):
    idle = [socket.create_connection(doorway.address) for _ in range(MAX_STRANGERS + 40)]
    for said in FIRST_WORDS:
        with socket.create_connection(doorway.address) as loud:
            loud.sendall(said)
            read_until_closed(loud)
    with pytest.raises(Unreachable):
        Channel.connect(doorway.address, b"guess", TIMEOUT_S)
    Channel.connect(doorway.address, SECRET, TIMEOUT_S).close()
    doorway.came.get(timeout=TIMEOUT_S).close()
    assert doorway.came.empty()
    read_until_closed(idle[0])  # the oldest
    for one in idle:
        one.close()


def test_a_doorway_that_is_closed_lets_nobody_in():
    closed = Doorway("127.0.0.1", SECRET, lambda channel: None)
    closed.close()
    with pytest.raises(Unreachable):
        Channel.connect(closed.address, SECRET, TIMEOUT_S)
