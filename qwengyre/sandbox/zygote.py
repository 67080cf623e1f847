"""The process that warm harnesses are forked from: `python -P -m qwengyre.sandbox.zygote CONTROL_FD MODULE...`.

It imports the harness once, single-threaded. For each execution it forks a child that joins the namespaces of a sandbox which
bubblewrap has made (like `docker exec`), gives up every privilege, and runs the module as `python -m` would. Bubblewrap stays the
authority on what can be seen; what a cold start gets from its supervisor comes from the same functions of `inside.py`.

Secrets: command, environment and key of an execution arrive in a file descriptor that only its own child reads. This process never
holds them, so no later child can find them in its memory. A child is not dumpable: programs that it starts can neither trace it nor
reach through its /proc entries the files of the host that it was started from.

    launcher --run(id, pid of process 1, descriptors)--> zygote --fork--> joiner --setns, fork--> harness
        <---------------- exit(id, code) ------------------ adopts and reaps it <--- ends
        <-------------- lost(id, reason) ---------------- its relay died (`relays.py`): the execution is to be dispatched again
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback

from qwengyre.sandbox import inside
from qwengyre.sandbox.channel import receive, send
from qwengyre.sandbox.keyring import join_new_session_keyring, leave_groups
from qwengyre.sandbox.namespaces import USER
from qwengyre.sandbox.relays import Relays
from qwengyre.sandbox.seccomp import filter_program

TYPE_CHECKING = False  # of `typing`, which is not imported: a start waits for it
if TYPE_CHECKING:
    from typing import NoReturn

    from qwengyre.sandbox.plans import Message, WarmPlan

NS_GET_USERNS = 0xB701
CLONE_NEWUSER = 0x10000000
NAMESPACES = {"mnt": 0x00020000, "net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "pid": 0x20000000}
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_CAPBSET_DROP = 24
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_V3 = 0x20080522
FAILED_TO_JOIN = 126

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, *arguments: int) -> int:
    return _check(libc.prctl(option, *[ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)][:4]), f"prctl({option})")


class CapabilitySet(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


class FilterProgram(ctypes.Structure):
    _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


class CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def join_namespaces(pid: int) -> int | None:
    """Enter every namespace of process `pid` but its last user namespace; return a descriptor of that one.

    The user namespace that owns the others comes first: in it this process has the capabilities that entering takes, whether it is root
    or not. bubblewrap's --disable-userns puts programs one user namespace further in, where none of these can be entered.
    """
    fds = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in (*NAMESPACES, "user")}
    owner = fcntl.ioctl(fds["mnt"], NS_GET_USERNS)
    _check(libc.setns(owner, CLONE_NEWUSER), "setns(user)")
    for name, kind in NAMESPACES.items():
        _check(libc.setns(fds[name], kind), f"setns({name})")
        os.close(fds[name])
    same = os.fstat(owner).st_ino == os.fstat(fds["user"]).st_ino
    os.close(owner)
    return None if same else fds["user"]


def give_up_privileges(last_user_namespace: int | None, filter_program: bytes) -> None:
    """Enter the innermost user namespace, then drop every capability and most system calls for good.

    Same end state as a program that bwrap starts.
    """
    if last_user_namespace is not None:
        _check(libc.setns(last_user_namespace, CLONE_NEWUSER), "setns(innermost user)")
    if os.getuid() != USER:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    header, nothing = CapabilityHeader(CAPABILITY_V3, 0), (CapabilitySet * 2)()
    _check(libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
    inside.prctl(inside.PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    program = FilterProgram(len(filter_program) // 8, ctypes.addressof(instructions))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def run_module(plan: WarmPlan) -> int:
    """Run the plan's `python -m MODULE ...` in this process, as a fresh interpreter would; return its exit code."""
    os.environ.clear()
    os.environ.update(plan["env"])
    os.chdir(plan["cwd"])
    sys.argv = plan["command"][2:]
    gc.enable()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # the harness's own failure, whatever it is, ends it as an interpreter would
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter calls at its end; it has no public name
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


class Zygote:
    """Forks harnesses and reports their ends. Single-threaded, and knows nothing of an execution but its number."""

    def __init__(self, control: socket.socket, relays: socket.socket) -> None:
        self.control, self.relays = control, relays
        self.children: dict[int, int] = {}
        """pid -> number of the execution."""
        self.wakeup, self.alarm = socket.socketpair()

    def serve(self) -> None:
        """Take messages until the launcher is gone, or the relays, without which no harness can be served."""
        inside.prctl(inside.PR_SET_CHILD_SUBREAPER, 1)
        self.wakeup.setblocking(False)
        self.alarm.setblocking(False)
        signal.set_wakeup_fd(self.alarm.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.epoll()
        for one in (self.control, self.relays, self.wakeup):
            poll.register(one.fileno(), select.EPOLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.wakeup.fileno():
                    self.wakeup.recv(4096)
                    self.reap()
                elif not (self.take() if fd == self.control.fileno() else self.tell_of_lost_relay()):
                    return

    def tell_of_lost_relay(self) -> bool:
        """Pass on that the relay of an execution died; False when the relays are gone as a whole."""
        received = receive(self.relays)
        if received is not None:
            send(self.control, {"id": received[0]["lost"], "lost": "the relay to the gateway of its sandbox died"})
        return received is not None

    def take(self) -> bool:
        """Handle one message; False when the launcher is gone."""
        received = receive(self.control)
        if received is None:
            return False
        message, fds = received
        if "kill" in message:
            pids = [pid for pid, number in self.children.items() if number == message["kill"]]
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            return True
        try:
            pid = self.fork_joined(message, fds) if message["holder"] else self.fork_supervised(message, fds)
            self.children[pid] = message["id"]
        except OSError as error:
            send(self.control, {"id": message["id"], "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def reap(self) -> None:
        """Report every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.children.pop(pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                send(self.relays, {"remove": number})
                send(self.control, {"id": number, "exit": code if code >= 0 else 128 - code})

    def fork_joined(self, message: Message, fds: list[int]) -> int:
        """Fork a joiner that enters the sandbox and forks the harness there; adopt the harness, return its pid out here."""
        reader, writer = os.pipe()
        joiner = os.fork()
        if joiner == 0:
            try:
                os.close(reader)
                last_user_namespace = self.prepare(message, fds)
                harness = os.fork()
                if harness:
                    os.write(writer, b"%d" % harness)
                    os._exit(0)
                os.close(writer)
                self.become_harness(message, fds, last_user_namespace)
            except BaseException as error:  # the outermost frame of a forked process: reported to the zygote, then it ends
                os.write(writer, f"!{error}".encode())
            finally:
                os._exit(FAILED_TO_JOIN)
        os.close(writer)
        try:
            answer = os.read(reader, 1024).decode()
        finally:
            os.close(reader)
            os.waitpid(joiner, 0)
        if not answer.isdigit():
            raise OSError(answer.lstrip("!") or "the joiner of a sandbox died")
        return int(answer)

    def prepare(self, message: Message, fds: list[int]) -> int | None:
        """In the joiner: leave groups and keyring, join the cgroups by their descriptors, then the namespaces."""
        leave_groups()
        join_new_session_keyring()
        for fd in fds[2:]:
            os.write(fd, b"0")
        return join_namespaces(message["holder"])

    def become_harness(self, message: Message, fds: list[int], last_user_namespace: int | None) -> NoReturn:
        """In the harness's own process, inside the sandbox: finish its descriptors, limits and privileges, then run it."""
        os.setsid()
        plan = read_plan(fds[0])
        listener = inside.listen(plan["relay"]["port"])
        send(self.relays, {"add": message["id"], "socket": plan["relay"]["socket"]}, [listener.fileno()])
        listener.close()
        give_up_privileges(last_user_namespace, filter_program())
        self.finish(plan, fds)

    def fork_supervised(self, message: Message, fds: list[int]) -> int:
        """Without isolation: fork a supervisor that is the subreaper of a harness, and ends with everything that it started."""
        pid = os.fork()
        if pid:
            return pid
        code = FAILED_TO_JOIN
        try:
            os.setsid()
            inside.prctl(inside.PR_SET_CHILD_SUBREAPER, 1)
            _prctl(inside.PR_SET_PDEATHSIG, signal.SIGTERM)
            for fd in fds[2:]:
                os.write(fd, b"0")
            harness = os.fork()
            if harness == 0:
                os.setsid()
                inside.prctl(inside.PR_SET_NO_NEW_PRIVS, 1)
                self.finish(read_plan(fds[0]), fds)
            code = inside.serve(harness, inside.Relay())
            inside.kill_descendants()
        finally:
            os._exit(code)

    def finish(self, plan: WarmPlan, fds: list[int]) -> NoReturn:
        """Descriptors, signals and limits of a harness, then the harness. Never returns."""
        os.umask(0o022)
        os.dup2(os.open(plan["stdin"], os.O_RDONLY), 0)
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, inside.NUM_FDS)
        inside.apply_limits({"cgroup_fds": [], "rlimits": plan["rlimits"]})
        os._exit(run_module(plan))


def start_relays(control: socket.socket) -> socket.socket:
    """Fork the process that forks relays, before the harness is imported, so that it stays small; return the channel to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        control.close()
        try:
            Relays(theirs).serve()
        finally:
            os._exit(1)
    theirs.close()
    return ours


def read_plan(fd: int) -> WarmPlan:
    """The plan of one execution, from a descriptor that was written before it was sent."""
    plan: WarmPlan = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return plan


def preload(modules: list[str]) -> int:
    """Import the harness, call its `preload()`; return the number of threads that are alive then (it must be 1)."""
    for name in modules:
        module = importlib.import_module(name)
        hook = getattr(module, "preload", None)
        if callable(hook):
            hook()
    gc.collect()
    gc.freeze()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def main(argv: list[str]) -> int:
    control = socket.socket(fileno=int(argv[1]))
    control.set_inheritable(False)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, inside.NUM_FDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote = Zygote(control, start_relays(control))
    try:
        threads = preload(argv[2:])
    except BaseException:  # whatever an import does is reported to the launcher, which refuses to start
        send(control, {"failed": traceback.format_exc(limit=-3)[-2000:]})
        return 1
    if threads != 1:
        send(
            control,
            {"failed": f"importing {', '.join(argv[2:])} left {threads} threads; only a single-threaded process can be forked"},
        )
        return 1
    send(control, {"ready": os.getpid()})
    zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
