"""Who does not know the secret is found out, on either side, without it being said."""

from __future__ import annotations

import msgspec
import pytest

from qwengyre.core.errors import WireError
from qwengyre.rpc.hello import MAX_HELLO_BYTES, Challenge, ClientHello, Proof, ServerHello, Welcome

SECRET, OTHER = b"s" * 32, b"o" * 32
NONCES = b"1" * 32, b"2" * 32


def pack(message: msgspec.Struct) -> bytes:
    packed = msgspec.msgpack.encode(message)
    assert len(packed) < MAX_HELLO_BYTES and SECRET not in packed
    return packed


def test_two_that_know_the_secret_welcome_each_other():
    server, client = ServerHello(SECRET, NONCES[0]), ClientHello(SECRET, NONCES[1])
    proof = client.hear(pack(server.opening()))
    assert not server.is_over and not client.is_over
    welcome = server.hear(pack(proof))
    assert server.is_over and not client.is_over
    assert client.hear(pack(welcome)) is None and client.is_over


@pytest.mark.parametrize("known", [(SECRET, OTHER), (OTHER, SECRET)])
def test_a_client_without_the_secret_is_not_welcome(known):
    server, client = ServerHello(known[0], NONCES[0]), ClientHello(known[1], NONCES[1])
    proof = client.hear(pack(server.opening()))
    with pytest.raises(WireError, match="does not know the secret"):
        server.hear(pack(proof))
    assert not server.is_over


def test_a_server_without_the_secret_is_found_out():
    client = ClientHello(SECRET, NONCES[1])
    proof = client.hear(pack(Challenge(NONCES[0])))
    for answer in (Welcome(b"x" * 32), Welcome(proof.mac)):  # made up, or the client's own words
        with pytest.raises(WireError, match="server does not know the secret"):
            client.hear(pack(answer))
    assert not client.is_over


def test_what_was_overheard_opens_no_other_connection():
    server, client = ServerHello(SECRET, NONCES[0]), ClientHello(SECRET, NONCES[1])
    overheard = pack(client.hear(pack(server.opening())))
    with pytest.raises(WireError):
        ServerHello(SECRET, b"3" * 32).hear(overheard)


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_nonces_of_another_length_are_refused(length: int):
    """Else bytes could be shifted from one nonce to the other under the same MAC."""
    with pytest.raises(WireError, match="nonce"):
        ServerHello(SECRET, NONCES[0]).hear(pack(Proof(b"n" * length, b"m" * 32)))
    with pytest.raises(WireError, match="nonce"):
        ClientHello(SECRET, NONCES[1]).hear(pack(Challenge(b"n" * length)))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"GET / HTTP/1.1", msgspec.msgpack.encode(Challenge(b"n" * 32))])
def test_anything_else_is_not_a_hello(body: bytes):
    with pytest.raises(WireError, match="not a hello"):
        ServerHello(SECRET, NONCES[0]).hear(body)
