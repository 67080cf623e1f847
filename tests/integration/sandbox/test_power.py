"""Nothing of a policy stays with power: not on the machine's files and devices, not in the run folder, not as a user of the machine."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import pwd
import stat
import sys
from pathlib import Path

import pytest

from qwengyre.sandbox.isolation import interpreter
from qwengyre.testing.sandbox_kit import HELLO, SCORE_HELLO, WAIT, calls, spec

pytestmark = pytest.mark.integration

MACHINE = [
    interpreter(),
    sys.executable,
    "/usr/bin/env",
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")),
]
SEIZE = f"""
import os
for path in [*{MACHINE!r}, "/proc/self/exe", "/proc/1/exe", "/proc/1/fd/0", "/dev/fd/0", "/dev/fd/1", *("/dev/" + n for n in os.listdir("/dev"))]:
    for mode in (0o4755, 0o2777, 0o600, 0):
        try:
            os.chmod(path, mode)
        except OSError:
            pass
for fd in range(64):
    for mode in (0o4755, 0o600):
        try:
            os.fchmod(fd, mode)
        except OSError:
            pass
"""


def modes() -> dict[str, int]:
    return {path: os.stat(path).st_mode for path in MACHINE}


def test_a_harness_cannot_change_modes_of_the_machine(kit, start):
    before = modes()
    outcome = kit.run(kit.task(SEIZE + HELLO), kit.config(start))
    assert outcome.score == 0.75, outcome.detail
    assert modes() == before


def test_a_scored_program_cannot_change_modes_of_the_machine(kit):
    before = modes()
    test_sh = f'python3 -I -S "$TESTS_DIR/seize.py" </dev/null >/dev/null\n{SCORE_HELLO}'
    outcome = kit.run(kit.task(HELLO, test_sh, files={"tests/seize.py": SEIZE}), kit.config())
    assert outcome.score == 0.75, outcome.detail
    assert modes() == before


def test_a_harness_prints_but_has_no_file_to_change(kit, start):
    code = """
        import os, sys
        print("first")
        print("second", file=sys.stderr)
        for fd in (0, 1, 2):
            for change in (lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, b"\\x7fELF", 0), lambda: os.fchmod(fd, 0o4755), lambda: os.lseek(fd, 0, 0)):
                try:
                    change()
                except OSError:
                    pass
        os.system("echo third > /dev/stdout; echo fourth > /proc/self/fd/2")
        found = sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2))
    """
    assert kit.found(code, kit.config(start)) == ["/dev/null", "pipe", "pipe"]
    kept = kit.folder / "failed/e000001-0.0/harness.log"
    assert sorted(kept.read_text().split()) == ["first", "fourth", "second", "third"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and kept.stat().st_uid == os.geteuid()


def test_a_flood_of_output_is_bounded_and_its_end_is_kept(kit, start):
    code = "import os, sys\nfor _ in range(280):\n    os.write(1, b'x' * 65536)\nprint('the last words')\nsys.exit(3)\n"
    outcome = kit.run(kit.task(code), kit.config(start))
    log = kit.folder / "failed/e000001-0.0/harness.log"
    assert outcome.exit_code == 3 and outcome.detail.endswith("the last words")
    assert 2**24 < log.stat().st_size < 2**24 + 4096 and b"bytes left out" in log.read_bytes()


async def test_each_sandbox_of_root_is_a_user_that_owns_nothing(kit, start):
    """A normal user's sandbox is that user, without power."""

    async with kit.launcher(kit.config(start)) as launcher, asyncio.TaskGroup() as group:
        runs = [
            group.create_task(launcher.run_execution(spec(kit.task(HELLO + "\n" + WAIT), f"e{n:06d}-0"), calls(1)))
            for n in (1, 2)
        ]
        while len(kit.requests) < 2:
            await asyncio.sleep(0.01)
        users = users_of_sandboxes()
        kit.go.set()
    assert [run.result().score for run in runs] == [0.75, 0.75]
    if os.geteuid():
        assert users == {os.geteuid()}
    else:
        assert len(users) == 2 and 0 not in users and not users & {entry.pw_uid for entry in pwd.getpwall()}


def users_of_sandboxes() -> set[int]:
    """Users of the processes that live in another pid namespace and descend from this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = set()
    for pid in parents:
        at = pid
        while at in parents and at != os.getpid():
            at = parents[at]
        try:
            inside = os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
            if at == os.getpid() and inside:
                found |= {
                    int(word)
                    for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                    if line.startswith("Uid:")
                    for word in line.split()[1:]
                }
        except OSError:
            continue
    return found


def test_keys_of_this_process_are_no_keys_of_a_sandbox(kit, start):
    add_key = {"x86_64": 248, "aarch64": 217}[platform.machine()]
    libc = ctypes.CDLL(None)
    libc.syscall(ctypes.c_long(add_key), b"user", b"qwengyre:ticket", b"payload", ctypes.c_long(7), ctypes.c_long(-3))
    code = "found = 'qwengyre:ticket' in open('/proc/keys').read()"
    assert kit.found(code, kit.config(start)) is False


def test_groups_of_root_are_no_groups_of_a_sandbox(kit, start):
    before = os.getgroups()
    if os.geteuid() == 0:
        os.setgroups([0, 6])
    try:
        groups = set(kit.found("import os\nfound = os.getgroups()", kit.config(start)))
    finally:
        if os.geteuid() == 0:
            os.setgroups(before)
    assert groups <= ({65534, 1000} if os.geteuid() else set())


def test_tests_that_only_their_owner_may_read_score(kit, start):
    """As a run makes them itself, whose files are its user's alone."""
    task = kit.task(HELLO, f'test -f "$TESTS_DIR/deep/expected" || exit 1\n{SCORE_HELLO}', files={"tests/deep/expected": "x"})
    for path in (*task.tests.rglob("*"), task.tests):
        path.chmod(0o700 if path.is_dir() else 0o600)
    outcome = kit.run(task, kit.config(start))
    assert outcome.score == 0.75, outcome.detail
    assert stat.S_IMODE((task.tests / "test.sh").stat().st_mode) == 0o600
