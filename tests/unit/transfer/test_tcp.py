"""The block server against peers that do not behave."""

from __future__ import annotations

import contextlib
import socket

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import TransferError
from qwengyre.transfer.tcp import LENGTH, MAX_SILENT, ReadRequest, TcpTransport

DEADLINE_S = 60.0


@pytest.fixture
def transport():
    made = TcpTransport(deadline_s=DEADLINE_S)
    yield made
    made.close()


def connect(location: str) -> socket.socket:
    host, port = location.partition("/")[0].split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


@pytest.mark.parametrize("sent", [b"", b"\xff\xff\xff\xff", LENGTH.pack(3) + b"abc", LENGTH.pack(10) + b"ab"])
def test_a_reader_that_sends_nonsense_or_dies_harms_nobody(transport, sent):
    exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
    with connect(exposure.location) as peer:
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
    np.testing.assert_array_equal(transport.read(exposure)["x"], np.arange(4))


def test_a_read_beyond_the_exposure_is_cut_off(transport):
    exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
    name = exposure.location.rpartition("/")[2]
    request = msgspec.msgpack.encode(ReadRequest(name, 1, 1, [(0, 1 << 20)]))
    with connect(exposure.location) as peer:
        peer.sendall(LENGTH.pack(len(request)) + request)
        assert peer.recv(1) == b"\0"
        assert peer.recv(1) == b""


def test_an_owner_that_never_answers_is_an_error_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = TcpTransport(deadline_s=0.05)
        exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        elsewhere = msgspec.structs.replace(exposure, location=f"{address}/name")
        with pytest.raises(TransferError, match=address):
            transport.read(elsewhere)
        transport.close()


def test_nobody_listening_is_an_error_with_the_address(transport):
    exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(TransferError, match=address):
        transport.read(msgspec.structs.replace(exposure, location=f"{address}/name"))


def test_idle_strangers_do_not_delay_a_read(transport):
    exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
    idle = [connect(exposure.location) for _ in range(MAX_SILENT + 40)]
    np.testing.assert_array_equal(transport.read(exposure)["x"], np.arange(4))
    with contextlib.suppress(ConnectionError):
        while idle[0].recv(4096):  # the oldest was closed
            pass
    for one in idle:
        one.close()


def test_a_transport_that_is_closed_listens_no_more():
    transport = TcpTransport()
    exposure = transport.expose({"x": np.arange(4)}, version=1, incarnation=1)
    transport.close()
    with pytest.raises(ConnectionError):
        connect(exposure.location)
