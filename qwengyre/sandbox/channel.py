"""Messages with descriptors between the launcher, the zygote and its relays: JSON over SOCK_SEQPACKET."""

from __future__ import annotations

import array
import json
import socket

TYPE_CHECKING = False  # of `typing`, which is not imported: a start waits for it
if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwengyre.sandbox.plans import Message

MAX_MESSAGE_BYTES = 4096
MAX_FDS = 8


def send(channel: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """One message of a SOCK_SEQPACKET channel, with descriptors."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([json.dumps(message).encode()], rights)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None when the other end is closed."""
    data, ancillary, _, _ = channel.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds: array.array[int] = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data), list(fds)) if data else None
