"""Real harness processes in real sandboxes, started cold and warm."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import ConfigError, SandboxError
from qwengyre.core.records import End, Validity
from qwengyre.sandbox.harness import Gateway
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.preflight import check_harness
from qwengyre.testing.sandbox_kit import PROBE, SECRET, Kit, calls, processes_with, report, spec

pytestmark = pytest.mark.integration
STARTS = ("cold", "warm")
HELLO = "open('hello', 'w').write('x')"


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> str:
    return request.param


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


def test_a_good_end_leaves_nothing_behind(kit, start):
    outcome = kit.run(kit.task(HELLO), kit.config(start))
    assert (outcome.end, outcome.score, outcome.exit_code) == (End.EXITED, 0.75, 0)
    assert not list((kit.folder / "work").glob("e0*")) and not (kit.folder / "failed").exists()


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
    assert cold["status"][-2:] == ["Seccomp:\t0", "Seccomp_filters:\t0"] and "NoNewPrivs:\t1" in cold["status"]
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


def test_the_key_is_on_no_command_line_and_in_no_detail(kit, start):
    code = "import os, time; print(os.environ['OPENAI_API_KEY'], flush=True); open('hello', 'w')\nwhile not os.path.exists('go'): time.sleep(0.05)\nsys.exit(3)"

    async def use(launcher: Launcher):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(launcher.run_execution(spec(kit.task(code)), calls(1)))
            while not list((kit.folder / "work").glob("e*/workspace/hello")):
                await asyncio.sleep(0)
            seen = processes_with(SECRET)
            next((kit.folder / "work").glob("e*/workspace")).joinpath("go").touch()
        return seen, running.result()

    seen, outcome = asyncio.run(kit.with_launcher(kit.config(start), use))
    assert seen == [] and SECRET not in outcome.detail and "<key>" in outcome.detail
    assert (outcome.end, outcome.exit_code, outcome.score) == (End.CRASHED, 3, 0.75)


DAEMON = """
    import os, subprocess, sys, time
    subprocess.Popen(["bash", "-c", "(setsid sleep 3141.{n} &) ; sleep 3141.{n}"], start_new_session=True)
    open("hello", "w").close()
    if {stay}: time.sleep(600)
"""


def daemon(kit, number: int, stay: bool):
    return kit.task(textwrap.dedent(DAEMON.format(n=number, stay=stay)))


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_everything_dies_with_the_harness(kit, start, isolation):
    number = 11 if start == "cold" else 12
    outcome = kit.run(daemon(kit, number, stay=False), kit.config(start, isolation=isolation))
    assert (outcome.end, outcome.score) == (End.EXITED, 0.75)
    assert processes_with(f"sleep 3141.{number}") == []


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_a_harness_timeout_kills_all_and_scores_the_workspace(kit, start, isolation):
    number = 21 if start == "cold" else 22
    outcome = kit.run(
        daemon(kit, number, stay=True), kit.config(start, isolation=isolation, timeout_s=4.0 if start == "cold" else 2.0)
    )
    assert (outcome.end, outcome.validity, outcome.score) == (End.HARNESS_TIMEOUT, Validity.VALID, 0.75)
    assert processes_with(f"sleep 3141.{number}") == []


def test_an_overall_timeout_drops(kit, start):
    outcome = kit.run(
        kit.task("import time; time.sleep(600)"), kit.config(start, overall_timeout_s=4.0 if start == "cold" else 2.0)
    )
    assert (outcome.end, outcome.validity, outcome.score, outcome.scored_state) == (
        End.OVERALL_TIMEOUT,
        Validity.DROPPED,
        0.0,
        "",
    )
    assert "overall_timeout_s" in outcome.detail and processes_with("e000001-0.0") == []


def test_cancelling_kills_everything(kit, start):
    number = 31 if start == "cold" else 32

    async def use(launcher: Launcher):
        running = asyncio.ensure_future(launcher.run_execution(spec(daemon(kit, number, stay=True)), calls(1)))
        while not processes_with(f"sleep 3141.{number}"):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return processes_with(f"sleep 3141.{number}"), running.cancelled()

    assert asyncio.run(kit.with_launcher(kit.config(start), use)) == ([], True)
    assert not list((kit.folder / "work").glob("e0*"))


def test_everything_dies_with_a_killed_launcher(kit, start):
    number = 41 if start == "cold" else 42
    task = daemon(kit, number, stay=True)
    script = f"""
from pathlib import Path
from qwengyre.sandbox.task import load_task
from qwengyre.testing.sandbox_kit import Kit
kit = Kit(Path({str(kit.folder)!r}))
kit.run(load_task(Path({task.folder!r})), kit.config({start!r}))
"""
    launcher = subprocess.Popen([sys.executable, "-c", script])
    marker = f"sleep 3141.{number}"
    while not processes_with(marker):
        assert launcher.poll() is None
    launcher.kill()
    launcher.wait()
    while processes_with(marker):
        pass


def test_memory_is_limited(kit, start):
    code = "open('hello', 'w').close(); import sys; blocks = [bytes(b'x' * 2**20) for _ in range(400)]; sys.exit(9)"
    outcome = kit.run(kit.task(code), kit.config(start, limits={"memory_mb": 150}))
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
        import time
        open("hello", "w").close()
        try:
            with open("big", "wb") as one:
                while one.tell() < 2**25: one.write(bytes(2**20))
        except OSError as error:
            print("one file:", error.errno)
        for i in range(2): open(f"part{i}", "wb").write(bytes(2**23))
        time.sleep(600)
    """
    outcome = kit.run(kit.task(textwrap.dedent(code)), kit.config(start, limits={"disk_mb": 20}))
    assert (outcome.end, outcome.validity, outcome.score) == (End.CRASHED, Validity.VALID, 0.75)
    assert "limits.disk_mb" in outcome.detail


def test_a_workspace_far_beyond_its_limits_is_a_placeholder(kit):
    code = "import os\nfor i in range(300): open(f'f{i}', 'w').close()"
    outcome = kit.run(kit.task(code), kit.config(limits={"files": 100}))
    assert (outcome.validity, outcome.score) == (Validity.PLACEHOLDER, 0.0) and "limits.files" in outcome.detail


def test_a_harness_that_never_calls_is_dropped_and_says_why(kit, start):
    outcome = kit.run(kit.task("sys.exit('no model configured')"), kit.config(start), num_calls=0)
    assert (outcome.end, outcome.validity) == (End.NEVER_CALLED, Validity.DROPPED)
    assert "without a model call" in outcome.detail and "no model configured" in outcome.detail


@pytest.mark.parametrize(
    ("test_sh", "reason"),
    [
        ("exit 7", "exit code 7, and the evaluator wrote neither"),
        ('echo nan > "$VERIFIER_DIR/reward.txt"', "nan, which is no score"),
        ('echo 1.5 > "$VERIFIER_DIR/reward.txt"', "outside [0, 1]"),
        ('echo {} > "$VERIFIER_DIR/reward.json"', "must hold a number"),
        ('ln -s /etc/hostname "$VERIFIER_DIR/reward.txt"', "cannot be read"),
        ('mkfifo "$VERIFIER_DIR/reward.txt"', "not a regular file"),
        ('head -c 100000 /dev/zero > "$VERIFIER_DIR/reward.txt"', "bytes"),
        ("echo broken evaluator; kill -9 $$", "broken evaluator"),
    ],
)
def test_an_evaluator_failure_is_retried_then_dropped(kit, test_sh, reason):
    outcome = kit.run(kit.task(HELLO, test_sh), kit.config(evaluator_tries=2))
    assert (outcome.end, outcome.validity, outcome.score) == (End.EVALUATOR_FAILED, Validity.DROPPED, 0.0)
    assert outcome.evaluator_tries == 2 and reason in outcome.detail and len(outcome.scored_state) == 32


def test_an_evaluator_timeout_is_a_failure(kit):
    outcome = kit.run(kit.task(HELLO, "sleep 600"), kit.config(evaluator_tries=1, verifier_timeout_s=0.5))
    assert outcome.end is End.EVALUATOR_FAILED and "did not end within 0.5 s" in outcome.detail


def test_a_score_of_zero_is_a_score(kit):
    outcome = kit.run(kit.task("pass"), kit.config())
    assert (outcome.end, outcome.validity, outcome.score, outcome.evaluator_tries) == (End.EXITED, Validity.VALID, 0.0, 1)


def test_each_try_of_the_evaluator_sees_what_the_harness_left(kit):
    counter = kit.folder / "tasks/hello/tests/count"
    test_sh = (
        f'test -f hello && rm hello && echo 1 > "$VERIFIER_DIR/reward.txt" && [ $(cat {counter} 2>/dev/null || echo 2) = 2 ]\n'
    )
    flaky = 'if [ "$(( RANDOM ))" -ge 0 ] && [ -f hello ]; then rm hello; echo oops > "$VERIFIER_DIR/reward.txt"; else exit 1; fi'
    outcome = kit.run(kit.task(HELLO, flaky), kit.config(evaluator_tries=3))
    assert outcome.evaluator_tries == 3 and "oops" in outcome.detail
    outcome = kit.run(kit.task(HELLO, test_sh), kit.config())
    assert outcome.score == 1.0
    assert (kit.folder / "tasks/hello/tests/test.sh").read_text() == test_sh


def test_a_harness_cannot_alter_how_it_is_scored(kit, start):
    code = """
        import os, stat
        for name in ("bash", "python3", "cat", "test"):
            open(name, "w").write("#!/bin/sh\\necho 1 > ${VERIFIER_DIR:-/logs/verifier}/reward.txt; exit 0\\n")
            os.chmod(name, 0o755)
        for name in (".bashrc", ".profile", ".bash_profile", "sitecustomize.py", "os.py", "usercustomize.py"):
            open(name, "w").write("import sys; open('/logs/verifier/reward.txt', 'w').write('1')")
        os.makedirs("tests", exist_ok=True)
        open("tests/test.sh", "w").write("echo 1 > /logs/verifier/reward.txt")
        os.symlink("/logs/verifier", "logs")
        os.system("(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)")
    """
    judge = 'python3 -I -S -c \'import os; open(os.environ["VERIFIER_DIR"] + "/reward.txt", "w").write("0.25")\''
    outcome = kit.run(kit.task(textwrap.dedent(code), judge), kit.config(start))
    assert (outcome.end, outcome.score) == (End.EXITED, 0.25), outcome.detail


def test_the_evaluator_has_no_network_and_the_task_variables(kit):
    test_sh = (
        'python3 -I -S -c \'import os; print(len(os.listdir("/sys/class/net")) if os.path.exists("/sys") else 0)\'\n'
        '[ "$COLOR $SHAPE" = "red round" ] && [ -z "$OPENAI_API_KEY" ] && [ ! -e /run/qwengyre ] && [ -f /tests/test.sh ] '
        "&& ! (exec 3<>/dev/tcp/127.0.0.1/8377) 2>/dev/null && echo 1 > /logs/verifier/reward.txt\n"
    )
    toml = 'env = { COLOR = "red" }\n[environment]\nenv = { SHAPE = "round" }\n'
    outcome = kit.run(kit.task("pass", test_sh, toml=toml), kit.config())
    assert outcome.score == 1.0, outcome.detail


def test_thirty_executions_at_once(kit, start):
    code = "import os, urllib.request; urllib.request.urlopen(os.environ['OPENAI_BASE_URL']); open('hello', 'w')"

    async def use(launcher: Launcher):
        task = kit.task(code)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(launcher.run_execution(spec(task, f"e{i:06d}-0"), calls(1))) for i in range(30)]
        return [run.result() for run in runs]

    outcomes = asyncio.run(kit.with_launcher(kit.config(start), use))
    assert {(outcome.end, outcome.score) for outcome in outcomes} == {(End.EXITED, 0.75)}
    assert len({outcome.scored_state for outcome in outcomes}) == 1 and len(kit.requests) == 30


def test_a_gateway_that_is_started_again_is_found(kit, start):
    code = """
        import os, time, urllib.request
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"])
        open("asked", "w").close()
        while not os.path.exists("go"): time.sleep(0.05)
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"])
        open("hello", "w").close()
    """

    async def use(launcher: Launcher):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(launcher.run_execution(spec(kit.task(textwrap.dedent(code))), calls(2)))
            while not (asked := list((kit.folder / "work").glob("e*/workspace/asked"))):
                await asyncio.sleep(0)
            os.unlink(launcher.gateway.socket)
            again = await asyncio.start_unix_server(kit.answer, launcher.gateway.socket)
            asked[0].with_name("go").touch()
        again.close()
        return running.result()

    outcome = asyncio.run(kit.with_launcher(kit.config(start), use))
    assert (outcome.end, outcome.score, len(kit.requests)) == (End.EXITED, 0.75, 2), outcome.detail


def test_a_socket_beside_others_is_refused(kit):
    async def use(launcher: Launcher):
        (Path(launcher.gateway.socket).parent / "control.sock").touch()
        Launcher(launcher.config, launcher.gateway, work=kit.folder / "work2", failed=kit.folder / "failed2")

    with pytest.raises(SandboxError, match=r"also holds control\.sock"):
        asyncio.run(kit.with_launcher(kit.config(), use))


def test_a_dead_zygote_is_replaced(kit):
    async def use(launcher: Launcher):
        task = kit.task(HELLO)
        first = await launcher.run_execution(spec(task), calls(1))
        os.kill(launcher._warm._process.pid, signal.SIGKILL)
        while launcher._warm._control is not None:
            await asyncio.sleep(0)
        return first, await launcher.run_execution(spec(task), calls(1))

    assert {outcome.end for outcome in asyncio.run(kit.with_launcher(kit.config("warm"), use))} == {End.EXITED}


def test_the_harnesses_of_a_dead_zygote_are_killed_and_scored(kit):
    async def use(launcher: Launcher):
        code = "import time; open('hello', 'w').close(); time.sleep(600)"
        async with asyncio.TaskGroup() as group:
            running = group.create_task(launcher.run_execution(spec(kit.task(code)), calls(1)))
            while not list((kit.folder / "work").glob("e*/workspace/hello")):
                await asyncio.sleep(0)
            os.kill(launcher._warm._process.pid, signal.SIGKILL)
        return running.result()

    outcome = asyncio.run(kit.with_launcher(kit.config("warm"), use))
    assert (outcome.end, outcome.validity, outcome.score, outcome.exit_code) == (End.CRASHED, Validity.VALID, 0.75, 137)


def test_a_full_disk_stops_the_run_with_a_sentence(kit, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qwengyre.sandbox.launcher.prepare_workspace", full)
    with pytest.raises(SandboxError, match=r"no space left for workspaces in .* MB free\): free some, and resume the run"):
        kit.run(kit.task(HELLO))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere_to_be_found", "nowhere_to_be_found"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads"),
    ],
)
def test_a_module_that_cannot_be_forked_is_refused_before_any_dispatch(kit, text, reason):
    (kit.modules / "bad_module.py").write_text(text)
    config = kit.config("warm", warm_modules=("bad_module",))
    with pytest.raises(SandboxError, match=reason):
        kit.run(kit.task(HELLO), config)


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


def test_a_sandbox_that_cannot_be_made_is_a_failed_setup(kit, start):
    async def use(launcher: Launcher):
        launcher.gateway = Gateway(str(kit.folder / "no such folder" / "harness.sock"))
        return await launcher.run_execution(spec(kit.task(HELLO)), calls(0))

    outcome = asyncio.run(kit.with_launcher(kit.config(start), use))
    assert (outcome.end, outcome.validity, outcome.score) == (End.SETUP_FAILED, Validity.PLACEHOLDER, 0.0)
    assert "no such folder" in outcome.detail


def test_a_harness_that_cannot_be_started_here_is_refused(kit, monkeypatch, tmp_path):
    hidden = tmp_path / "agent"
    hidden.write_text("#!/bin/sh\n")
    hidden.chmod(0o755)
    for command, reason in ((("no-such-agent",), "does not exist"), ((str(hidden),), "not in the sandbox")):
        with pytest.raises(ConfigError, match=reason):
            check_harness(msgspec.structs.replace(kit.config(), command=command))
    check_harness(msgspec.structs.replace(kit.config(), command=(str(hidden),), readable=(str(tmp_path),)))
    hidden.write_text("#! /opt/no/such/python3 -x\n")
    with pytest.raises(ConfigError, match=r"is run by /opt/no/such/python3, which is not in the sandbox"):
        check_harness(msgspec.structs.replace(kit.config(), command=(str(hidden),), readable=(str(tmp_path),)))
    with pytest.raises(ConfigError, match="does not exist"):
        check_harness(kit.config(readable=("/no/such/folder",)))
    with pytest.raises(SandboxError, match="not installed in this environment"):
        check_harness(msgspec.structs.replace(kit.config(), command=("python3", "-m", "no_such_module")))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="apt install bubblewrap"):
        check_harness(kit.config())
    check_harness(msgspec.structs.replace(kit.config(isolation="none"), command=("bash",)))


def test_a_readable_folder_that_shows_other_workspaces_is_refused(kit):
    with pytest.raises(SandboxError, match=r"harness\.readable"):
        kit.run(kit.task(HELLO), kit.config(readable=(str(kit.folder),)))
