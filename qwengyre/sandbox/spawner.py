"""Start programs from a thread that has given up what a sandbox must not inherit from this process.

Groups and keyrings belong to a thread. This one leaves root's groups, and joins a new session keyring before each start: what the user
keeps in his (tickets, tokens) is out of reach, and two sandboxes share none. Programs are started with the thread as their parent, so it
lives as long as they do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox.keyring import join_new_session_keyring, leave_groups
from qwengyre.sandbox.process import Process, Program

MFD_EXEC: Final = 0x10


class Spawner:
    """Owns the thread. Close it when everything that it started has ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "spawner", leave_groups)

    def start(self, program: Program) -> Process:
        """Start a program in its own session. Raises OSError (FileNotFoundError and the like)."""
        try:
            popen = self._thread.submit(_popen, program).result()
        finally:
            for fd in program.handed_fds:
                os.close(fd)
        return Process(popen, in_pid_namespace=program.is_sandbox, lifeline=program.lifeline)

    def close(self) -> None:
        self._thread.shutdown()


def _popen(program: Program) -> subprocess.Popen[bytes]:
    join_new_session_keyring()
    return subprocess.Popen(
        program.command,
        executable=program.executable or None,
        env=program.env,
        stdin=program.stdin,
        stdout=program.output if program.stdout is None else program.stdout,
        stderr=program.output,
        pass_fds=(*program.pass_fds, *program.handed_fds),
        start_new_session=True,
        bufsize=0,
    )


def _executable_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_EXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a kernel before 6.3, where every such file can be executed
            return os.memfd_create(name, flags)
        if error.errno == errno.EACCES:
            message = "this machine executes no files in memory, which warm starts need: sysctl vm.memfd_noexec=1, or warm_start = false"
            raise SandboxError(message) from None
        raise


def run_from_memory(program: Program, executable: str) -> Program:
    """`program` with a sealed copy of `executable` in place of the file.

    A process reaches the file that it runs through /proc/self/exe, by the mount that it was started from. A harness that is forked from a
    process of the machine could so make the machine's own interpreter setuid, or useless. Raises OSError.
    """
    fd = _executable_file(os.path.basename(executable))
    with open(executable, "rb") as file, open(fd, "wb", closefd=False) as copy:
        shutil.copyfileobj(file, copy)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return msgspec.structs.replace(program, executable=f"/proc/self/fd/{fd}", handed_fds=(*program.handed_fds, fd))
