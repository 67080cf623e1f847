"""How both ends of a connection prove that they know the run's secret, before either acts on a word of the other. Pure.

    server -> client   Challenge: 32 random bytes
    client -> server   Proof: 32 random bytes of its own, and a MAC over both under the secret
    server -> client   Welcome: another MAC over both

The secret itself never crosses. Whoever listens learns nothing that opens another connection, since every connection has random
bytes of its own; and whoever sits at the address of a process that is gone is found out by the client. Without `[tls]` what follows is
neither encrypted nor signed: somebody on the path between two machines can read and change it. With it, TLS follows (`rpc/tls.py`).
"""

from __future__ import annotations

import hmac
from typing import Final, Literal, TypeVar

import msgspec

from qwengyre.core.errors import WireError

NONCE_BYTES: Final = 32
MAX_HELLO_BYTES: Final = 256
"""A frame of a hello has under 100."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    tls: bool = False
    """What follows the hello is TLS."""


class Proof(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    mac: bytes
    tls: bool = False


class Welcome(msgspec.Struct, frozen=True, tag=True):
    mac: bytes


Said = TypeVar("Said", Challenge, Proof, Welcome)


class ServerHello:
    """The server's side of one connection; `nonce` is `NONCE_BYTES` of its own, random. With `tls` the client must want it, too."""

    def __init__(self, secret: bytes, nonce: bytes, *, tls: bool = False) -> None:
        self._secret, self._nonce, self._tls = secret, nonce, tls
        self.is_over = False

    def opening(self) -> Challenge | None:
        return Challenge(self._nonce, self._tls)

    def hear(self, body: bytes) -> Welcome:
        """What to answer the client's frame. Raises WireError: close the connection then."""
        proof = _decode(body, Proof)
        _compare(self._tls, proof.tls)
        if not hmac.compare_digest(proof.mac, mac(self._secret, "client", self._nonce, proof.nonce)):
            raise WireError("the peer does not know the secret of this run")
        self.is_over = True
        return Welcome(mac(self._secret, "server", self._nonce, proof.nonce))


class ClientHello:
    """The client's side; `nonce` as the server's."""

    def __init__(self, secret: bytes, nonce: bytes, *, tls: bool = False) -> None:
        self._secret, self._nonce, self._tls = secret, nonce, tls
        self._challenge: bytes | None = None
        self.is_over = False

    def opening(self) -> None:
        """The server speaks first."""

    def hear(self, body: bytes) -> Proof | None:
        """What to answer the server's frame. Raises WireError: close the connection then."""
        if self._challenge is None:
            challenge = _decode(body, Challenge)
            _compare(self._tls, challenge.tls)
            self._challenge = challenge.nonce
            return Proof(self._nonce, mac(self._secret, "client", self._challenge, self._nonce), self._tls)
        welcome = _decode(body, Welcome)
        if not hmac.compare_digest(welcome.mac, mac(self._secret, "server", self._challenge, self._nonce)):
            raise WireError("the server does not know the secret of this run")
        self.is_over = True
        return None


def mac(secret: bytes, side: Literal["client", "server"], server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The side is in it, so that neither end can be answered with its own words. Raises WireError for nonces of another length."""
    if len(server_nonce) != NONCE_BYTES or len(client_nonce) != NONCE_BYTES:
        raise WireError(f"the peer's nonce does not have {NONCE_BYTES} bytes")
    return hmac.digest(secret, b"qwengyre hello " + side.encode() + server_nonce + client_nonce, "sha256")


def _compare(here: bool, there: bool) -> None:
    """Whoever is on the path can change what is said here: the connection ends then, and never goes on without TLS."""
    if here != there:
        raise WireError(
            f"{'this process speaks TLS and the other end does not' if here else 'the other end speaks TLS and this process does not'}: "
            "set the same [tls] on every node"
        )


def _decode(body: bytes, expected: type[Said]) -> Said:
    try:
        return msgspec.msgpack.decode(body, type=expected)
    except msgspec.DecodeError as error:
        raise WireError(f"not a hello of this version: {error}") from None
