"""How processes of torch find each other without trusting the network: through a store that asks for the secret, with a proof.

gloo takes whoever connects for the peer that it waits for. So every two members send each other a MAC under the secret over the
connection that they will sum over, before anything else. Who was not told where to connect, or was quicker than the right one, has none.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has these names, too, but not in its types

from qwengyre.core.errors import WireError
from qwengyre.rpc.address import TcpAddress, parse_address
from qwengyre.rpc.store import StoreClient

PROOF_BYTES: Final = 32
PROOF_TAG: Final = 0x5147
"""Of the messages of a proof; sums have tags of their own."""
Result = TypeVar("Result")


class SecretStore(c10d.Store):
    """torch's interface to a `KeyStore`. Keep it as long as torch uses it: torch keeps only its C++ half alive."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._heard(lambda: self._client.wait([key]))[0]

    def add(self, key: str, amount: int) -> int:
        return self._heard(lambda: self._client.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self._client.wait(keys, 0.0)
        except WireError:
            return False
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._heard(lambda: self._client.wait(keys, None if timeout is None else timeout.total_seconds()))

    def delete_key(self, key: str) -> bool:
        return self._heard(lambda: self._client.delete(key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Every wait says its own."""

    def _heard(self, ask: Callable[[], Result]) -> Result:
        """torch knows its own errors. Raises DistStoreError."""
        try:
            return ask()
        except (WireError, OSError) as error:
            raise dist.DistStoreError(str(error)) from error


def prove(group: dist.ProcessGroup, rank: int, size: int, key: bytes) -> None:
    """Every two of the group prove to each other who they are. Raises WireError; RuntimeError when one does not come.

    `key` is theirs alone (`group_key`).
    """
    others = [peer for peer in range(size) if peer != rank]
    sending = [group.send([_tensor(_proof(key, rank, peer))], peer, PROOF_TAG) for peer in others]
    for peer in others:
        heard = torch.zeros(PROOF_BYTES, dtype=torch.uint8, device="cpu")
        group.recv([heard], peer, PROOF_TAG).wait()
        if not hmac.compare_digest(heard.numpy().tobytes(), _proof(key, peer, rank)):
            raise WireError(f"who connected as rank {peer} does not know the secret of this run")
    for sent in sending:
        sent.wait()


def group_key(secret: bytes, store: str, name: str) -> bytes:
    """Of one group: no two of a run have the same store and name, so that no proof of an earlier one is of use."""
    return hmac.digest(secret, f"qwengyre group {store} {name}".encode(), "sha256")


def _proof(key: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(key, f"qwengyre member {sender} to {receiver}".encode(), "sha256")


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def own_address(store: str) -> str:
    """The address of this machine that faces the store. What gloo takes by itself, the host's name, is often a loopback address.

    >>> own_address("tcp://127.0.0.1:80")
    '127.0.0.1'
    """
    where = parse_address(store)
    assert isinstance(where, TcpAddress), "stores are reached over TCP"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # of a datagram, nothing is sent by this
        probe.connect(where)
        return str(probe.getsockname()[0])
