"""The process that forks a relay for each warm sandbox, so that what one harness does to its relay reaches no other.

    harness --add(id, socket path), listening socket--> relays --fork--> relay of that sandbox --Unix socket--> gateway
    zygote  --remove(id)------------------------------> relays --SIGKILL--> relay
            <----------------------lost(id)------------ relays <-- a relay that ended unasked

The zygote forks it before the harness is imported, so that it and its relays stay small.
"""

from __future__ import annotations

import os
import select
import signal
import socket

from qwengyre.sandbox import inside
from qwengyre.sandbox.channel import receive, send

LISTENER_FD = 3
"""Where a relay has the socket that it serves; it has no other descriptor above standard error."""


class Relays:
    """Forks relays, ends them, and says which one ended unasked. Single-threaded."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.numbers: dict[int, int] = {}
        """pidfd -> number of the execution."""
        self.pids: dict[int, int] = {}
        """Number -> pid."""
        self.poll = select.epoll()
        self.poll.register(channel.fileno(), select.EPOLLIN)

    def serve(self) -> None:
        """Take orders until the zygote is gone."""
        while True:
            for fd, _ in self.poll.poll():
                if fd != self.channel.fileno():
                    self.reap(fd)
                elif not self.take():
                    return

    def take(self) -> bool:
        """Carry out one order; False when there will be no more."""
        received = receive(self.channel)
        if received is None:
            return False
        message, fds = received
        if "remove" in message:
            if message["remove"] in self.pids:
                os.kill(self.pids.pop(message["remove"]), signal.SIGKILL)
            return True
        try:
            self.add(message["add"], message["socket"], fds[0])
        except (OSError, IndexError):
            send(self.channel, {"lost": message["add"]})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def add(self, number: int, path: str, listener: int) -> None:
        """Fork the relay of one execution. Raises OSError when the machine has no room for it."""
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                become_relay(own, listener, path)
            finally:
                os._exit(1)
        self.pids[number] = pid
        pidfd = os.pidfd_open(pid)
        self.numbers[pidfd] = number
        self.poll.register(pidfd, select.EPOLLIN)

    def reap(self, pidfd: int) -> None:
        """A relay has ended: its execution is lost, unless it was asked to."""
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        number = self.numbers.pop(pidfd)
        if self.pids.pop(number, None) is not None:
            send(self.channel, {"lost": number})


def become_relay(parent: int, listener: int, path: str) -> None:
    """In a forked process: keep nothing but the listener, and relay until killed."""
    inside.prctl(inside.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.dup2(listener, LISTENER_FD)
    os.closerange(LISTENER_FD + 1, inside.NUM_FDS)
    relay = inside.Relay()
    relay.add(socket.socket(fileno=LISTENER_FD), path)
    while True:
        for fd, events in relay.epoll.poll():
            relay.handle(fd, events)
