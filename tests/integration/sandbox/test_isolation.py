"""What a harness sees and may do in its sandbox, started cold and warm."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import textwrap
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.records import End, Validity
from qwengyre.testing.sandbox_kit import HELLO, PROBE, SECRET, STARTS, WAIT, calls, processes_with, report, spec

pytestmark = pytest.mark.integration


def test_harness_reaches_the_gateway_and_is_scored(kit, start):
    code = """
        import urllib.request, os
        body = os.urandom(3_000_000)
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data=body)
        found = urllib.request.urlopen(request).read() == body and open("data.txt").read() == "data\\n"
        open("hello", "w")
    """
    outcome = kit.run(kit.task(report(code)), kit.config(start))
    assert (outcome.end, outcome.validity, outcome.score, outcome.exit_code) == (End.CRASHED, Validity.VALID, 0.75, 3)
    assert len(outcome.scored_state) == 32 and outcome.evaluator_tries == 1 and outcome.duration_s > 0
    assert json.loads((kit.folder / "failed/e000001-0.0/workspace/found.json").read_text()) is True
    assert kit.requests[0].startswith(b"POST /x/1/v1/chat/completions HTTP/1.1")


def test_cold_and_warm_end_up_with_the_same_limits(kit):
    code = """
        import resource, os
        def lines(path, *starts): return [l for l in open(path).read().splitlines() if l.startswith(starts)]
        found = {
            "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
            "status": lines("/proc/self/status", "Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp"),
            "mounts": sorted((l.split()[4], l.split()[5]) for l in open("/proc/self/mountinfo")),
            "root": sorted(os.listdir("/")), "etc": sorted(os.listdir("/etc")), "home": sorted(os.listdir("/")),
            "env": {k: v for k, v in os.environ.items() if k != "_"}, "cwd": os.getcwd(), "uid": os.getuid(), "gid": os.getgid(),
            "files": sorted(os.listdir()), "fds": len(os.listdir("/proc/self/fd")), "signals": lines("/proc/self/status", "SigBlk"),
            "cgroups": [l.split(":")[1] for l in open("/proc/self/cgroup") if "qwengyre-" in l],
            "session": os.getsid(0) == os.getpid(), "umask": os.umask(0o22), "interfaces": sorted(os.listdir("/sys/class/net")) if os.path.exists("/sys") else [],
            "routes": open("/proc/net/route").read().splitlines()[1:], "host": os.uname().nodename,
        }
    """
    cold, warm = (kit.found(code, kit.config(start)) for start in STARTS)
    assert cold == warm
    assert cold["env"]["OPENAI_BASE_URL"] == cold["env"]["ANTHROPIC_BASE_URL"] + "/v1" == "http://127.0.0.1:8377/x/1/v1"
    assert cold["status"][-2:] == ["Seccomp:\t2", "Seccomp_filters:\t1"] and "NoNewPrivs:\t1" in cold["status"]
    assert [line for line in cold["status"] if line.startswith("Cap") and set(line.split()[1]) != {"0"}] == []


def test_the_host_is_hidden_or_read_only(kit, start):
    secret = kit.folder / "work" / "other-execution"
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("x")
    paths = [
        str(secret),
        str(kit.folder / "tasks"),
        "/etc/shadow",
        str(Path.home() / ".bashrc"),
        str(Path.home() / ".ssh"),
        "/tests",
        "/sys/fs",
        "/var",
        str(Path(__file__).parent),
    ]
    code = f"""
        import os
        def writable(path):
            try: open(path, "w").close(); return True
            except OSError: return False
        found = {{"visible": [p for p in {paths} if os.path.exists(p)],
                 "writable": [p for p in ("/usr/x", "/x", "/etc/x", "/dev/x", "/run/x", "/run/qwengyre/instruction.md",
                              "/proc/sys/kernel/core_pattern",
                              "/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/proc/irq/0/smp_affinity", "/logs/verifier/reward.txt", "/logs/x") if writable(p)],
                 "own": [p for p in ("/workspace/a", "/app/b", "/tmp/c", "/tmp/home/d", "/dev/shm/e") if not writable(p)]}}
    """
    assert kit.found(code, kit.config(start)) == {"visible": [], "writable": [], "own": []}


def test_no_host_network_and_no_other_process(kit, start):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0qwengyre-{os.getpid()}-{start}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
            import os, socket
            def reaches(family, address):
                with socket.socket(family) as one:
                    one.settimeout(2)
                    return one.connect_ex(address) == 0
            found = [reaches(socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]})), reaches(socket.AF_INET, ("10.0.0.1", 80)),
                     reaches(socket.AF_UNIX, {name!r}), os.path.exists("/proc/{os.getpid()}"),
                     len([p for p in os.listdir("/proc") if p.isdigit()]) > 3]
        """
        assert kit.found(code, kit.config(start)) == [False] * 5


def test_privileges_cannot_be_gained(kit, start):
    code = """
        import ctypes, os, subprocess
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(result): return result != 0 and ctypes.get_errno() in (1, 13, 22, 28)
        found = [refused(libc.unshare(0x10000000)), refused(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
                 refused(libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)), refused(libc.chroot(b"/usr")),
                 refused(libc.setuid(0)),
                 subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode != 0]
    """
    assert kit.found(code, kit.config(start)) == [True] * 6


def test_a_program_of_a_warm_harness_cannot_reach_into_it(kit):
    code = """
        import os, subprocess
        pid = os.getpid()
        done = [subprocess.run(["cat", f"/proc/{pid}/{name}"], capture_output=True).returncode for name in ("mem", "environ", "exe", "fd/1")]
        found = all(done)
    """
    assert kit.found(code, kit.config("warm")) is True


async def test_the_key_is_on_no_command_line_and_in_no_detail(kit, start):
    code = f"import os; print(os.environ['OPENAI_API_KEY'], flush=True)\n{HELLO}\n{WAIT}sys.exit(3)"

    async with kit.launcher(kit.config(start)) as launcher, asyncio.TaskGroup() as group:
        running = group.create_task(launcher.run_execution(spec(kit.task(code)), calls(1)))
        await kit.waiting.wait()
        seen = processes_with(SECRET)
        kit.go.set()
    outcome = running.result()
    assert seen == [] and SECRET not in outcome.detail and "<key>" in outcome.detail
    assert (outcome.end, outcome.exit_code, outcome.score) == (End.CRASHED, 3, 0.75)


def test_standard_input_and_placeholders(kit, start):
    config = msgspec.structs.replace(
        kit.config(start),
        command=(
            "python3",
            "-m",
            PROBE,
            report("found = [sys.stdin.read(), sys.argv[2:], os.getcwd()]"),
            "--at={workspace}",
            "{model}",
        ),
        stdin=True,
    )
    kit.run(kit.task("do {model} it\n"), config)
    found = json.loads((kit.folder / "failed/e000001-0.0/workspace/found.json").read_text())
    assert found == ["do {model} it\n", ["--at=/workspace", "policy"], "/workspace"]


def test_memory_is_limited(kit, start):
    code = "open('hello', 'w').close(); import sys; blocks = [bytes(b'x' * 2**20) for _ in range(400)]; sys.exit(9)"
    outcome = kit.run(kit.task(code), kit.config(start, limits={"memory_mb": 150, "disk_mb": 100}))
    assert (outcome.end, outcome.validity, outcome.score) == (End.CRASHED, Validity.VALID, 0.75)
    assert outcome.exit_code != 9 and ("memory limit" in outcome.detail or "MemoryError" in outcome.detail)


def test_processes_are_limited(kit, start):
    code = """
        import os, signal
        pids = []
        try:
            while len(pids) < 200:
                pid = os.fork()
                if pid == 0: signal.pause()
                pids.append(pid)
        except OSError as error:
            limit = error.errno
        for pid in pids: os.kill(pid, signal.SIGKILL)
        found = [len(pids) < 40, limit]
    """
    assert kit.found(code, kit.config(start, limits={"processes": 40})) == [True, 11]


def test_disk_is_limited(kit, start):
    code = """
        open("hello", "w").close()
        try:
            with open("big", "wb") as one:
                while one.tell() < 2**25: one.write(bytes(2**20))
        except OSError as error:
            print("one file:", error.errno)
        for i in range(2): open(f"part{i}", "wb").write(bytes(2**23))
    """
    outcome = kit.run(kit.task(textwrap.dedent(code) + WAIT), kit.config(start, limits={"disk_mb": 20}))
    assert (outcome.end, outcome.validity, outcome.score) == (End.CRASHED, Validity.VALID, 0.75)
    assert "limits.disk_mb" in outcome.detail


def test_a_workspace_far_beyond_its_limits_earns_the_lowest_score(kit):
    """Nothing of it is scored, but it counts: else a policy could drop its own bad executions."""
    code = "import os\nfor i in range(300): open(f'f{i}', 'w').close()"
    toml = "[metadata]\nreward_range = [-1, 1]\n"
    outcome = kit.run(kit.task(code, toml=toml), kit.config(limits={"files": 100, "workspace": "disk"}))
    assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, -1.0)
    assert "scored -1" in outcome.detail and "limits.files" in outcome.detail
