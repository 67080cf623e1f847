"""TLS between the processes of a run, as a choice: the `[tls]` table.

A process is of one run, so what it speaks on TCP is set once, when it starts (`use`), and every wire asks here. On the wires of `rpc/`
TLS begins after the hello: until both ends have proved that they know the secret, a stranger costs what he costs without it. Whether
there is TLS is no matter of negotiation: both ends say in the hello what they were told, and part if it differs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError, WireError
from qwengyre.core.ids import LocalPath

log = logging.getLogger(__name__)
FILES: Final = ("cert", "key", "ca")
CLOSE_S: Final = 1.0
"""Longest wait for the other end's farewell when a connection is closed."""
MOST_ROUNDS: Final = 10
"""Of a handshake in memory; TLS 1.3 takes two."""


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """TLS 1.3 between the processes of a run: both ends show a certificate of the run's own CA. Give all three files, or none."""

    cert: LocalPath = LocalPath("")
    """This node's certificate, with those between it and the CA, as PEM. On every node at this path."""
    key: LocalPath = LocalPath("")
    """Its private key, as PEM, without a passphrase; readable by this user only."""
    ca: LocalPath = LocalPath("")
    """The certificate of the run's own CA, as PEM. Whoever has a certificate of it counts as a node: take none of a public CA."""
    sums_trust_network: bool = False
    """gloo, which sums gradients, speaks no TLS in torch's builds. Set it to true if sums between nodes go through a tunnel, or over a network
    of their own; a run over several nodes with TLS does not start otherwise."""

    def __post_init__(self) -> None:
        missing = [name for name in FILES if not getattr(self, name)]
        if missing and len(missing) < len(FILES):
            raise ValueError(f"{' and '.join(missing)} must be given, too: TLS needs cert, key and ca")
        if self.sums_trust_network and missing:
            raise ValueError("sums_trust_network has no effect without cert, key and ca")

    @property
    def is_wanted(self) -> bool:
        return bool(self.cert)


class Contexts(msgspec.Struct, frozen=True):
    """Of one process."""

    config: TlsConfig
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(cls, config: TlsConfig) -> Contexts:
        """Raises ConfigError for files that cannot be read, do not belong together, or are not of the CA."""
        contexts = cls(config, *(_context(config, protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)))
        contexts.try_in_memory()
        return contexts

    def try_in_memory(self) -> None:
        """A handshake with itself: whatever another node would refuse this one for shows now. Raises ConfigError."""
        pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            self.server.wrap_bio(pipes[0], pipes[1], server_side=True),
            self.client.wrap_bio(pipes[1], pipes[0], server_side=False),
        )
        try:
            for _ in range(MOST_ROUNDS):
                for end in ends:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as error:
            what = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else _reason(error)
            raise ConfigError(
                f"this certificate is not one of {self.config.ca} that other nodes would take: {what}. Make one with that CA",
                file=self.config.cert,
                key="tls.cert",
            ) from error


def _context(config: TlsConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # nodes are addresses that a cluster hands out; the CA is the run's alone
    context.verify_mode = ssl.CERT_REQUIRED
    for name in FILES:
        path = getattr(config, name)
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"cannot read this file ({error.strerror})", file=path, key=f"tls.{name}") from error
    try:
        context.load_verify_locations(config.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"this is no certificate in PEM ({_reason(error)})", file=config.ca, key="tls.ca") from error
    try:
        context.load_cert_chain(config.cert, config.key, lambda: _refuse_passphrase(config))
    except ssl.SSLError as error:
        message = f"this and {config.key} are no certificate and its key in PEM ({_reason(error)})"
        raise ConfigError(message, file=config.cert, key="tls.cert") from error
    return context


def _refuse_passphrase(config: TlsConfig) -> str:
    raise ConfigError(
        "this key asks for a passphrase, and nobody is there to type it: take one without", file=config.key, key="tls.key"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


_used: Contexts | None = None


def use(config: TlsConfig) -> None:
    """From now on, in this process. Raises ConfigError."""
    global _used
    _used = Contexts.load(config) if config.is_wanted else None
    if _used is not None:
        log.info("speaks_tls", extra={"cert": config.cert})


def used() -> Contexts | None:
    """What this process speaks on TCP; None: no TLS."""
    return _used


def config_used() -> TlsConfig:
    """For the processes that this one starts."""
    return _used.config if _used is not None else TlsConfig()


@contextlib.contextmanager
def using(config: TlsConfig) -> Iterator[None]:
    """For a while. Raises ConfigError."""
    before = config_used()
    use(config)
    try:
        yield
    finally:
        use(before)


def in_words(error: ssl.SSLError) -> str:
    """What a broken connection says of the other end, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of the CA in tls.ca ({error.verify_message}): give every node one of the same CA"
    reason = _reason(error)
    if "alert" in reason:
        return f"it does not take this node's certificate ({reason}): give every node one of the same CA (tls.cert, tls.ca)"
    if "mac" in reason or "decrypt" in reason:
        return f"what came was changed on its way ({reason}): somebody is on the path, or the network is broken"
    return f"it does not speak TLS as this node does ({reason}): set the same [tls] on every node"


def wrapped(connection: socket.socket, contexts: Contexts, *, is_server: bool) -> ssl.SSLSocket:
    """TLS on a connection that blocks, within its timeout. Raises WireError, OSError."""
    try:
        return (contexts.server if is_server else contexts.client).wrap_socket(connection, server_side=is_server)
    except ssl.SSLError as error:
        raise WireError(in_words(error)) from error


def received(connection: socket.socket, target: memoryview) -> int:
    """As `recv_into`; what is wrong with TLS in words. Raises OSError."""
    try:
        return connection.recv_into(target)
    except ssl.SSLError as error:
        raise ConnectionError(in_words(error)) from error
