"""Limits hold for an execution as a whole; where the kernel cannot be made to hold them, nothing starts unless it was told to."""

from __future__ import annotations

import asyncio
import os

import pytest

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End
from qwengyre.sandbox import host
from qwengyre.sandbox.limits import CGROUP_PREFIX, find_cgroup_parent
from qwengyre.sandbox.preflight import check_harness
from qwengyre.testing.sandbox_kit import HELLO, WAIT, calls, spec

pytestmark = pytest.mark.integration

FORKS = """
    import os, signal
    pids = []
    try:
        while len(pids) < 300:
            pid = os.fork()
            if pid == 0: signal.pause()
            pids.append(pid)
    except OSError as error:
        limit = error.errno
    for pid in pids: os.kill(pid, signal.SIGKILL)
    found = [len(pids) < 40, limit]
"""
SHARED = {
    "memfd": "fd = os.memfd_create('x'); [os.write(fd, bytes(2**20)) for _ in range(400)]",
    "shared mapping": "import mmap; kept = mmap.mmap(-1, 400 * 2**20); [kept.write(b'x' * 2**20) for _ in range(400)]",
    "several processes": "[os.fork() or (bytearray(b'x' * 100 * 2**20), time.sleep(600)) for _ in range(4)]; time.sleep(600)",
}


@pytest.fixture
def cgroups():
    parent = find_cgroup_parent(f"{CGROUP_PREFIX}{os.getpid()}-test")
    if parent is None:
        pytest.skip("this user may make no cgroups")
    parent.remove()


@pytest.fixture
def no_cgroups(monkeypatch):
    monkeypatch.setattr(host, "find_cgroup_parent", lambda name: None)


def test_processes_are_limited_without_cgroups(kit, start, no_cgroups):
    assert kit.found(FORKS, kit.config(start, limits={"processes": 40})) == [True, 11]


async def test_two_executions_do_not_count_for_each_other_without_cgroups(kit, start, no_cgroups):
    """As they would if the kernel knew them as one user."""
    code = "import subprocess\nkept = [subprocess.Popen(['sleep', '600']) for _ in range(12)]\n" + HELLO + "\n"

    async with kit.launcher(kit.config(start, limits={"processes": 24})) as launcher, asyncio.TaskGroup() as group:
        runs = [
            group.create_task(launcher.run_execution(spec(kit.task(code + WAIT), f"e{n:06d}-0"), calls(1))) for n in (1, 2, 3)
        ]
        while len(kit.requests) < 3:
            await asyncio.sleep(0.01)
        kit.go.set()
    assert [run.result().score for run in runs] == [0.75] * 3


@pytest.mark.parametrize("limits", [{"best_effort": False}])
def test_a_run_that_cannot_be_limited_does_not_start_unless_told(kit, no_cgroups, limits):
    for begin in (check_harness, lambda config: kit.run(kit.task(HELLO), config)):
        with pytest.raises(SandboxError, match=r"cannot be limited here.*best_effort = true in \[harness\.limits\]"):
            begin(kit.config(limits=limits))
    assert kit.run(kit.task(HELLO), kit.config(isolation="none", limits=limits)).score == 0.75


@pytest.mark.parametrize("kind", SHARED)
def test_shared_memory_counts(kit, start, cgroups, kind):
    code = f"import os, sys, time\nopen('hello', 'w').close()\n{SHARED[kind]}\nsys.exit(9)"
    outcome = kit.run(
        kit.task(code), kit.config(start, limits={"memory_mb": 150, "disk_mb": 1000, "workspace": "disk"}, timeout_s=20.0)
    )
    assert outcome.end in (End.CRASHED, End.HARNESS_TIMEOUT) and outcome.exit_code != 9 and outcome.score == 0.75
    assert "memory limit" in outcome.detail or outcome.end is End.HARNESS_TIMEOUT
