"""The first process of a cold sandbox: apply limits, open the relay, start the harness, reap, end with its exit code.

Runs as `python -I -S inside.py PLAN` and is process 1 of its pid namespace, so that everything dies with it. It
imports a few C modules of the standard library and nothing of QwenGyre: its start is on the path of every cold execution.
The warm start (`zygote.py`) uses the same `apply_limits`, `listen` and `Relay`, so both end up with the same limits.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # of `typing`, which is not imported: a start waits for it
if TYPE_CHECKING:
    from typing import NoReturn

    from qwengyre.sandbox.plans import BoundsPlan, ColdPlan, ProgramPlan

CHUNK_BYTES = 65536
MAX_CONNECTIONS = 256
"""Of one harness to its gateway at once; the largest that was seen has some twenty. One more is closed as soon as it is made."""
SPARE_FDS = 12
"""For what else a relay's process has open, and for the connection that it refuses."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_PAUSE_S = 0.05
"""A machine without descriptors or memory is asked again after this, instead of at once and for ever."""
NUM_FDS = 65536
"""More than any process here has open."""
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36


def apply_limits(plan: BoundsPlan) -> None:
    """Join the cgroups whose `cgroup.procs` are open as `plan["cgroup_fds"]`, then set `plan["rlimits"]` (name -> value)."""
    for fd in plan["cgroup_fds"]:
        os.write(fd, b"0")
        os.close(fd)
    for name, value in plan["rlimits"].items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def listen(port: int) -> socket.socket:
    """Open the loopback port that the harness knows as its gateway."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    listener.setblocking(False)
    return listener


class Relay:
    """Copy bytes between TCP connections of one or more listeners and the gateway's Unix socket. One thread, one epoll.

    Each direction buffers at most one chunk: a reader that is slower than its writer slows the writer down. No connection can end it:
    what fails closes that connection, and there are never more of them than this process has descriptors for.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.targets: dict[int, tuple[socket.socket, str]] = {}
        self.peers: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.watched: dict[int, int] = {}
        self.pending: dict[int, bytes] = {}
        self.finished: set[int] = set()
        self.max_connections = max(1, min(MAX_CONNECTIONS, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FDS) // 2))

    def add(self, listener: socket.socket, path: str) -> None:
        """Relay every connection of `listener` to the Unix socket at `path`."""
        self.targets[listener.fileno()] = (listener, path)
        self.epoll.register(listener.fileno(), select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Close one listener; its open connections end when either side closes."""
        listener, _ = self.targets.pop(fd)
        self.epoll.unregister(fd)
        listener.close()

    def handle(self, fd: int, events: int) -> None:
        """Do what one epoll event of this relay asks for."""
        if fd in self.targets:
            self._accept(*self.targets[fd])
        elif fd in self.peers:
            source, sink = self.peers[fd]
            try:
                if events & select.EPOLLOUT:
                    self._flush(source)
                if fd in self.peers and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._forward(source, sink)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    self._close(source, sink)

    def _accept(self, listener: socket.socket, path: str) -> None:
        try:
            inner, _ = listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM:
                time.sleep(NO_ROOM_PAUSE_S)
            return
        if len(self.peers) >= 2 * self.max_connections:
            inner.close()
            return
        try:
            self._join(inner, path)
        except OSError:
            self._close(inner)

    def _join(self, inner: socket.socket, path: str) -> None:
        outer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            outer.connect(path)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for one, other in ((inner, outer), (outer, inner)):
                one.setblocking(False)
                self.peers[one.fileno()] = (one, other)
            self._watch(inner)
            self._watch(outer)
        except OSError:
            self._close(outer)
            raise

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        if sink.fileno() in self.pending:
            return
        data = source.recv(CHUNK_BYTES)
        if not data:
            self._end(source, sink)
            return
        sent = self._send(sink, data)
        if sent < len(data):
            self.pending[sink.fileno()] = data[sent:]
            self._watch(sink)
            self._watch(source)

    def _flush(self, sink: socket.socket) -> None:
        data = self.pending.pop(sink.fileno(), b"")
        sent = self._send(sink, data)
        if sent < len(data):
            self.pending[sink.fileno()] = data[sent:]
        self._watch(sink)
        self._watch(self.peers[sink.fileno()][1])

    def _watch(self, one: socket.socket) -> None:
        """Read from `one` unless its peer is full or it has ended; write to it while something is pending.

        What is wanted of neither is not registered at all: epoll would report its hang-up again and again.
        """
        fd = one.fileno()
        peer = self.peers[fd][1]
        full = peer.fileno() in self.pending or fd in self.finished
        wanted = (0 if full else select.EPOLLIN) | (select.EPOLLOUT if fd in self.pending else 0)
        if self.watched.pop(fd, 0):
            self.epoll.unregister(fd)
        if wanted:
            self.epoll.register(fd, wanted)
            self.watched[fd] = wanted

    def _send(self, sink: socket.socket, data: bytes) -> int:
        try:
            return sink.send(data)
        except BlockingIOError:
            return 0

    def _end(self, source: socket.socket, sink: socket.socket) -> None:
        """`source` will send no more: pass that on, and close both once both have ended."""
        self.finished.add(source.fileno())
        if sink.fileno() in self.finished:
            self._close(source, sink)
            return
        sink.shutdown(socket.SHUT_WR)
        self._watch(source)

    def _close(self, *pair: socket.socket) -> None:
        for one in pair:
            fd = one.fileno()
            if self.watched.pop(fd, 0):
                self.epoll.unregister(fd)
            self.peers.pop(fd, None)
            self.pending.pop(fd, None)
            self.finished.discard(fd)
            one.close()


def kill_descendants() -> None:
    """Kill every descendant, orphans included (they come back to a subreaper), until none is left."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for _ in children:
            os.wait()


def prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _start(plan: ColdPlan) -> int:
    """Fork and exec the harness in its own session; it gets no descriptor but standard input, output and error.

    Only the child reads the command and the variables, and then empties their file: programs of the harness can read the memory of
    this process, and must find no key there.
    """
    pid = os.fork()
    if pid:
        os.close(plan["harness"])
        return pid
    command = ["the harness"]
    try:
        harness: ProgramPlan = json.loads(os.pread(plan["harness"], os.fstat(plan["harness"]).st_size, 0))
        os.ftruncate(plan["harness"], 0)
        command = harness["command"]
        os.setsid()
        os.umask(0o022)
        os.dup2(os.open(plan["stdin"], os.O_RDONLY), 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, NUM_FDS)
        os.chdir(plan["cwd"])
        os.execvpe(command[0], command, harness["env"])
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def keep_only(plan: ColdPlan) -> None:
    """Close every descriptor that the plan does not name; the /dev/null to read is that of the sandbox, not the machine's."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    after = 2
    for fd in sorted(fd for fd in (plan["lifeline"], plan["harness"], *plan["cgroup_fds"], NUM_FDS) if fd >= 0):
        os.closerange(after + 1, fd)
        after = fd


def _kill_if_alive(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def serve(harness: int, relay: Relay, lifeline: int = -1) -> int:
    """Relay and reap until the harness ends; return its exit code (128 + signal when killed).

    SIGTERM ends the harness, and so does the end of `lifeline`, a pipe that the launcher holds open: no harness outlives its launcher.
    """
    wakeup, alarm = socket.socketpair()
    wakeup.setblocking(False)
    alarm.setblocking(False)
    signal.set_wakeup_fd(alarm.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: _kill_if_alive(harness))
    for fd in (wakeup.fileno(), lifeline):
        if fd >= 0:
            relay.epoll.register(fd, select.EPOLLIN)
    while True:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid == harness:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break
        for fd, events in relay.epoll.poll():
            if fd == wakeup.fileno():
                wakeup.recv(4096)
            elif fd == lifeline:
                relay.epoll.unregister(fd)
                _kill_if_alive(harness)
            else:
                relay.handle(fd, events)


def replace_by_script(plan: ColdPlan) -> NoReturn:
    """Become the script of the plan, which so is process 1, and dies with the launcher."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    script: ProgramPlan = json.loads(os.pread(plan["harness"], os.fstat(plan["harness"]).st_size, 0))
    try:
        os.umask(0o022)
        os.closerange(3, NUM_FDS)
        os.chdir(plan["cwd"])
        os.execvpe(script["command"][0], script["command"], script["env"])
    except OSError as error:
        os.write(2, f"cannot start {script['command'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def main(argv: list[str]) -> int:
    plan = json.loads(argv[1])
    keep_only(plan)
    apply_limits(plan)
    if plan["replaces"]:
        replace_by_script(plan)
    relay = Relay()
    if plan["relay"]:
        relay.add(listen(plan["relay"]["port"]), plan["relay"]["socket"])
    if plan["subreaper"]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    code = serve(_start(plan), relay, plan["lifeline"])
    if plan["subreaper"]:
        kill_descendants()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
