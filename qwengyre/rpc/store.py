"""A small store of keys in one process, in which several that know the secret leave word for one another: where they listen.

What torch's own store does for a rendezvous. That one listens on every interface of the machine and asks nobody who he is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from qwengyre.core.errors import Unreachable, WireError
from qwengyre.rpc.address import TcpAddress, parse_address
from qwengyre.rpc.channel import Channel, Reply
from qwengyre.rpc.doorway import Doorway
from qwengyre.rpc.server import Done

SLACK_S: Final = 5.0
"""How much longer than the store itself a client waits for it: for the way there and back."""


class SetKey(msgspec.Struct, frozen=True, tag=True):
    key: str
    value: bytes


class AddTo(msgspec.Struct, frozen=True, tag=True):
    """Add to a number, 0 at first; the reply is the sum."""

    key: str
    amount: int


class WaitKeys(msgspec.Struct, frozen=True, tag=True):
    """The values of all `keys`, once they are there. Refused with Unreachable when they are not within `timeout_s`."""

    keys: tuple[str, ...]
    timeout_s: float


class DeleteKey(msgspec.Struct, frozen=True, tag=True):
    """The reply is 1 if it was there, else 0."""

    key: str


class Number(msgspec.Struct, frozen=True, tag=True):
    number: int


class Values(msgspec.Struct, frozen=True, tag=True):
    values: tuple[bytes, ...]


class KeyStore:
    """Serves at `address` until it is closed, in threads of its own."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Raises ConfigError when it cannot listen on `host`."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._doorway = Doorway(host, secret, self._serve)
        self._channels: set[Channel] = set()
        self.address = str(self._doorway.address)

    def close(self) -> None:
        """Nobody comes in any more, and who waits here hears that it is over."""
        self._doorway.close()
        with self._changed:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _serve(self, channel: Channel) -> None:
        with self._changed:
            self._channels.add(channel)
        with contextlib.suppress(OSError):  # the other end went away
            channel.serve({SetKey: self._set, AddTo: self._add, WaitKeys: self._wait, DeleteKey: self._delete})
        with self._changed:
            self._channels.discard(channel)
        channel.close()

    def _set(self, asked: SetKey) -> Done:
        with self._changed:
            self._values[asked.key] = asked.value
            self._changed.notify_all()
        return Done()

    def _add(self, asked: AddTo) -> Number:
        with self._changed:
            try:
                number = int(self._values.get(asked.key, b"0")) + asked.amount
            except ValueError:
                raise WireError(f"what {asked.key} holds is not a number") from None
            self._values[asked.key] = str(number).encode()
            self._changed.notify_all()
        return Number(number)

    def _wait(self, asked: WaitKeys) -> Values:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in asked.keys), asked.timeout_s):
                missing = ", ".join(key for key in asked.keys if key not in self._values)
                raise Unreachable(self.address, f"nobody said {missing} within {asked.timeout_s:g} s")
            return Values(tuple(self._values[key] for key in asked.keys))

    def _delete(self, asked: DeleteKey) -> Number:
        with self._changed:
            return Number(int(self._values.pop(asked.key, None) is not None))


class StoreClient:
    """One process's end. Safe to use from several threads, of which one at a time is served. Raises WireError, OSError."""

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        """Raises Unreachable when nobody there knows the secret within the deadline."""
        where = parse_address(address)
        assert isinstance(where, TcpAddress), "stores are reached over TCP"
        self._channel, self._timeout_s = Channel.connect(where, secret, timeout_s), timeout_s
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._call(SetKey(key, value), Done, 0.0)

    def add(self, key: str, amount: int) -> int:
        return self._call(AddTo(key, amount), Number, 0.0).number

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> tuple[bytes, ...]:
        """The values of `keys`, once they are there; `timeout_s` is the client's own by default."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._call(WaitKeys(tuple(keys), timeout_s), Values, timeout_s).values

    def delete(self, key: str) -> bool:
        return bool(self._call(DeleteKey(key), Number, 0.0).number)

    def close(self) -> None:
        self._channel.close()

    def _call(self, request: msgspec.Struct, expected: type[Reply], wait_s: float) -> Reply:
        with self._lock:
            began = time.monotonic()
            self._channel.set_deadline(wait_s + SLACK_S)
            try:
                return self._channel.call(request, expected)
            except TimeoutError:
                raise Unreachable("the store", f"did not answer within {time.monotonic() - began:.0f} s") from None
