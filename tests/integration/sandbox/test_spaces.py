"""The disk of an execution is bounded by the kernel, whatever is written and however fast; where it cannot be, nothing starts unless told."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from qwengyre.core.errors import SandboxError
from qwengyre.core.records import End, Validity
from qwengyre.sandbox import spaces
from qwengyre.sandbox.preflight import check_harness
from qwengyre.testing.sandbox_kit import HELLO, calls, spec

pytestmark = pytest.mark.integration

LIMIT_MB, MOST_MB = 16, 17
"""What is allowed, and what there is of a workspace of that limit (`spaces.HEADROOM`)."""
LIMITS = {"disk_mb": LIMIT_MB, "files": 64, "memory_mb": 512}
BURSTS = {
    "fallocate": "os.posix_fallocate(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY), 0, 2**20)",
    "files without a name": "os.write(os.open('.', os.O_TMPFILE | os.O_RDWR), bytes(2**20))",
    "files that lose their name": "f = os.open('f', os.O_CREAT | os.O_WRONLY); os.unlink('f'); os.write(f, bytes(2**20))",
    "what nobody may enter": (
        "os.mkdir(f'd{n}'); f = os.open(f'd{n}/f', os.O_CREAT | os.O_WRONLY); os.write(f, bytes(2**20)); os.chmod(f'd{n}', 0)"
    ),
    "mappings": (
        "f = os.open(f'f{n}', os.O_CREAT | os.O_RDWR); os.ftruncate(f, 2**20); m = mmap.mmap(f, 2**20)\n"
        "    os.posix_fallocate(f, 0, 2**20); m[:] = b'x' * 2**20; kept.append(m)"
    ),
    "other names": "os.mkdir('/app/d') if n == 0 else open(f'/app/d/f{n}', 'wb').write(bytes(2**20))",
    "past the longest path": "os.mkdir('n' * 250); os.chdir('n' * 250); open('f', 'wb').write(bytes(2**20))",
}


@pytest.fixture(params=["as it is", "no cgroups"])
def machine(request, monkeypatch):
    if request.param == "no cgroups":
        monkeypatch.setattr("qwengyre.sandbox.host.find_cgroup_parent", lambda name: None)


@pytest.mark.parametrize("burst", BURSTS)
def test_no_burst_passes(kit, start, machine, monkeypatch, burst):
    """Also when nobody looks: what is counted here is what the kernel let it have."""
    monkeypatch.setattr("qwengyre.sandbox.disk_watch.PERIOD_S", 3600.0)
    code = f"""
import mmap, os
{HELLO}
top, kept, found = os.open('.', os.O_RDONLY), [], [0, 0]
for n in range(40):
  try:
    {BURSTS[burst]}
    found[0] += 1
  except OSError as error:
    found[1] = error.errno
    break
os.fchdir(top)
for n in range(40):
  if os.path.isdir(f'd{{n}}'): os.chmod(f'd{{n}}', 0o700)
if n := found[0] and os.path.isdir('n' * 250): import shutil; found[1] = found[1]; os.system('rm -rf n*')
else: os.system('rm -rf d* f*; true')
"""
    (written, errno) = kit.found(code, kit.config(start, limits=LIMITS))
    assert LIMIT_MB - 2 <= written <= MOST_MB and errno == 28


def test_names_are_bounded_too(kit, start, machine, monkeypatch):
    monkeypatch.setattr("qwengyre.sandbox.disk_watch.PERIOD_S", 3600.0)
    code = """
import os
made = 0
try:
    for made in range(1000): os.mkdir(f'd{made}') if made % 2 else os.symlink('x', f'd{made}')
except OSError as error: found = [made, error.errno]
for n in range(made): os.rmdir(f'd{n}') if n % 2 else os.unlink(f'd{n}')
"""
    made, errno = kit.found(code, kit.config(start, limits=LIMITS))
    assert 60 <= made <= 68 and errno == 28


def test_who_passes_the_limit_is_ended_and_told(kit, start):
    code = (
        f"import os, time\n{HELLO}\nf = os.open('.', os.O_TMPFILE | os.O_RDWR)\nos.posix_fallocate(f, 0, 2**24)\ntime.sleep(600)"
    )
    outcome = kit.run(kit.task(code), kit.config(start, limits=LIMITS))
    assert (outcome.end, outcome.validity, outcome.score) == (End.CRASHED, Validity.VALID, 0.75)
    assert "limits.disk_mb" in outcome.detail


def test_a_scorer_is_bounded_too(kit, monkeypatch):
    """In its log folder as well, and by files without a name."""
    monkeypatch.setattr("qwengyre.sandbox.disk_watch.PERIOD_S", 3600.0)
    flood = "import os\nn = 0\ntry:\n  while n < 99: os.write(os.open('{}', os.O_TMPFILE | os.O_RDWR), bytes(2**20)); n += 1\nexcept OSError: pass"
    scripts = [f'python3 -I -S -c "{flood.format(place)}\nprint(n)" > /tmp/n' for place in (".", "/logs/verifier")]
    judge = (
        "read n < /tmp/n; [ $n -gt 20 -a $n -lt 40 ] && echo 1 > $VERIFIER_DIR/reward.txt || echo 0.5 > $VERIFIER_DIR/reward.txt"
    )
    for script in scripts:
        assert kit.run(kit.task(HELLO, f"{script}\n{judge}\n"), kit.config(limits=LIMITS)).score == 1.0


async def test_nothing_stays_of_a_space(kit, start):
    async with kit.launcher(kit.config(start)) as launcher:
        for number in range(3):
            await launcher.run_execution(
                spec(kit.task(f"{HELLO}\nopen('x', 'wb').write(bytes(2**20))"), f"e{number:06d}-0"), calls(1)
            )
        mounter = launcher.host.spaces._mounts._process.pid
        with open(f"/proc/{mounter}/mountinfo") as mounts:
            here = [line for line in mounts if str(kit.folder) in line]
        fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        assert here == [] and [fd for fd in fds if spaces.MOUNT_POINT in fd] == []
        assert list((kit.folder / "work").glob("e0*")) == []


async def test_the_machine_sees_no_mount_and_the_mounter_may_die(kit, start):
    async with kit.launcher(kit.config(start)) as launcher:
        task = kit.task(f"{HELLO}\nimport time\nwhile not __import__('os').path.exists('go'): time.sleep(0.01)")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(launcher.run_execution(spec(task, "e000001-0"), calls(1)))
            while not (space := launcher._live.get("e000001-0")) or not (space.workspace / "hello").exists():
                await asyncio.sleep(0.01)
            with open("/proc/self/mountinfo") as mounts:
                assert str(kit.folder) not in mounts.read()
            process = launcher.host.spaces._mounts._process
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            (space.workspace / "go").touch()
        assert running.result().score == 0.75, running.result().detail
        assert (await launcher.run_execution(spec(kit.task(HELLO), "e000002-0"), calls(1))).score == 0.75


@pytest.fixture
def has_cgroups(monkeypatch):
    """Also where none can be made: the disk is what a test is about."""
    monkeypatch.setattr("qwengyre.sandbox.host.SandboxHost._unlimited", lambda host: "")


def test_where_nothing_can_be_mounted_nothing_starts_unless_told(kit, start, has_cgroups, monkeypatch):
    monkeypatch.setattr(spaces.mounter, "__file__", os.devnull)
    for begin in (check_harness, lambda config: kit.run(kit.task(HELLO), config)):
        with pytest.raises(SandboxError, match=r"disk of an execution cannot be limited here.*best_effort = true"):
            begin(kit.config(start, limits={"best_effort": False}))
    assert kit.run(kit.task(HELLO), kit.config(start)).score == 0.75


def test_workspaces_on_disk_need_best_effort(kit, start, has_cgroups):
    with pytest.raises(SandboxError, match='workspace = "disk"'):
        check_harness(kit.config(start, limits={"workspace": "disk", "best_effort": False}))
    limits = {"workspace": "disk", "disk_mb": 16}
    assert kit.run(kit.task(HELLO), kit.config(start, limits=limits)).score == 0.75
    closed = "os.makedirs('a/b'); open('a/b/f', 'wb').write(bytes(2**24)); os.chmod('a/b', 0); os.chmod('a', 0)"
    code = f"import os, time\n{HELLO}\nfor n in range(2):\n  os.mkdir(f'd{{n}}'); os.chdir(f'd{{n}}'); {closed}; os.chdir('..')\ntime.sleep(600)"
    outcome = kit.run(kit.task(code), kit.config(start, limits=limits))
    assert outcome.end is End.CRASHED and "limits.disk_mb" in outcome.detail, outcome.detail
