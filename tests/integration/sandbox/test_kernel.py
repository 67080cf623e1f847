"""Which doors of the kernel a harness and a scored program find shut."""

from __future__ import annotations

import platform

import pytest

from qwengyre.testing.sandbox_kit import HELLO, STARTS

pytestmark = pytest.mark.integration

KNOCK = """
import ctypes, errno, mmap, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(*words):
    result = libc.syscall(*[ctypes.c_long(word) for word in words])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "open"
def opens(*kind):
    try:
        socket.socket(*kind).close()
        return "open"
    except OSError as error:
        return errno.errorcode[error.errno]
column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
numbers = {
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_secret": (447, 447), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "fsopen": (430, 430), "open_tree": (428, 428), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "clone3": (435, 435), "new": (500, 500), "kcmp": (312, 272), "syslog": (103, 116),
}
found = {name: call(number[column], 1) for name, number in numbers.items()}
found["families"] = [family for family in range(1, 46) if opens(family, socket.SOCK_DGRAM) == "open"]
found["vsock"] = opens(40, socket.SOCK_STREAM)
found["netlink"] = [protocol for protocol in range(23) if opens(socket.AF_NETLINK, socket.SOCK_RAW, protocol) == "open"]
found["clone"] = call((56, 220)[column], 17 | 0x10000000, 0, 0, 0, 0)
found["seccomp"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Seccomp:")]
"""
EXPECTED = {
    "families": [1, 2, 10, 16],
    "vsock": "EPERM",
    "netlink": [0],
    "clone": "EPERM",
    "seccomp": ["2"],
    "clone3": "ENOSYS",
    "new": "ENOSYS",
}


def assert_shut(found: dict) -> None:
    assert {name: found.pop(name) for name in EXPECTED} == EXPECTED
    assert set(found.values()) == {"EPERM"}, found


def test_kernel_doors_are_shut_for_a_harness(kit, start):
    assert_shut(kit.found(KNOCK, kit.config(start)))


def test_kernel_doors_are_shut_for_what_an_evaluator_runs(kit):
    shut = "found['vsock'] == found['clone'] == 'EPERM' and found['families'] == [1, 2, 10, 16] and found['seccomp'] == ['2']"
    test_sh = 'python3 -I -S "$TESTS_DIR/knock.py" > "$VERIFIER_DIR/reward.txt"'
    score = f"{KNOCK}\nok = {shut} and {{found[n] for n in numbers}} == {{'EPERM', 'ENOSYS'}}\nprint(float(ok))\n"
    outcome = kit.run(kit.task(HELLO, test_sh, files={"tests/knock.py": score}), kit.config())
    assert outcome.score == 1.0, outcome.detail


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a machine with three ABIs")
def test_other_abis_of_the_machine_do_not_exist(kit, start):
    code = """
        import ctypes, mmap
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
        getpid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        found = [getpid(), libc.syscall(ctypes.c_long(0x40000000 | 39)), ctypes.get_errno()]
    """
    assert kit.found(code, kit.config(start)) == [-38, -1, 38]


def test_a_tracer_traces_its_own_child(kit, start):
    """Debuggers, and sandboxes of harnesses that look at their tools, work as in a container of Docker."""
    code = """
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        pid = os.fork()
        if pid == 0:
            libc.ptrace(0, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(7)
        stopped = os.WIFSTOPPED(os.waitpid(pid, 0)[1])
        libc.ptrace(7, pid, 0, 0)
        found = [stopped, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    """
    assert kit.found(code, kit.config(start)) == [True, 7]


PROC = "kpagecount kpageflags kpagecgroup timer_list kcore keys vmallocinfo slabinfo pagetypeinfo sched_debug kmsg sysrq-trigger latency_stats"


@pytest.mark.parametrize("who", ["cold", "warm", "evaluator"])
def test_proc_tells_nothing_that_root_alone_may_read(kit, who):
    code = f"""
told = []
for name in {PROC!r}.split():
    try:
        if open(f"/proc/{{name}}", "rb").read(1): told.append(name)
    except OSError: pass
    try:
        open(f"/proc/{{name}}", "ab").close(); told.append(name + " can be written")
    except OSError: pass
found = told + [line for line in open("/proc/kallsyms") if int(line.split()[0], 16)][:1]
"""
    if who != "evaluator":
        assert kit.found(code, kit.config(who)) == []
        return
    script = "python3 -I -S - <<'END' > /tmp/found\n" + code + "\nprint(found)\nEND\n"
    judge = 'test "$(cat /tmp/found)" = "[]"; echo $((1 - $?)) > $VERIFIER_DIR/reward.txt\n'
    assert kit.run(kit.task(HELLO, script + judge), kit.config()).score == 1.0


def test_cold_and_warm_have_one_filter(kit):
    code = "found = [l for l in open('/proc/self/status') if l.startswith(('Seccomp', 'NoNewPrivs'))]"
    assert len({str(kit.found(code, kit.config(start))) for start in STARTS}) == 1
