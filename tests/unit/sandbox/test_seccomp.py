"""The filter of system calls, run instruction by instruction as the kernel would, for both machines."""

from __future__ import annotations

import struct

import pytest

from qwengyre.sandbox.seccomp import ALLOW, MACHINES, REFUSE, UNKNOWN, filter_program

X86, ARM = "x86_64", "aarch64"
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17

REFUSED = {
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_secret": (447, 447),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "acct": (163, 89), "quotactl": (179, 60), "kcmp": (312, 272),
    "process_madvise": (440, 440), "move_pages": (279, 239), "mbind": (237, 235), "vmsplice": (278, 75), "lookup_dcookie": (212, 18),
    "sethostname": (170, 161), "setdomainname": (171, 162), "nfsservctl": (180, 42), "vhangup": (153, 58),
}  # fmt: skip
X86_ONLY = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134, "ustat": 136, "_sysctl": 156, "create_module": 174}
NEEDED = {
    "read": (0, 63), "write": (1, 64), "openat": (257, 56), "mmap": (9, 222), "execve": (59, 221), "futex": (202, 98), "exit_group": (231, 94),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "inotify_init1": (294, 26),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "statx": (332, 291), "rseq": (334, 293),
    "getrandom": (318, 278), "connect": (42, 203), "accept4": (288, 242), "prlimit64": (302, 261), "memfd_create": (319, 279),
    "rt_sigreturn": (15, 139), "set_robust_list": (273, 99), "membarrier": (324, 283), "io_setup": (206, 0), "fchmodat2": (452, 452),
}  # fmt: skip
X86_NEEDED = {"open": 2, "stat": 4, "fork": 57, "vfork": 58, "arch_prctl": 158, "epoll_wait": 232, "pipe": 22, "select": 23}


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the filter answers to a call."""
    arch = MACHINES[machine].arch if arch is None else arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    at = accumulator = 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif code == 0x05:
            at += constant
        elif code == 0x06:
            return constant
        else:
            holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_doors_are_shut_and_programs_get_what_they_need(machine):
    column = [X86, ARM].index(machine)
    for name, numbers in REFUSED.items():
        assert decide(machine, numbers[column]) == REFUSE, name
    for name, numbers in NEEDED.items():
        assert decide(machine, numbers[column]) == ALLOW, name


def test_calls_that_only_x86_has():
    assert {name: decide(X86, number) for name, number in X86_ONLY.items()} == dict.fromkeys(X86_ONLY, REFUSE)
    assert {name: decide(X86, number) for name, number in X86_NEEDED.items()} == dict.fromkeys(X86_NEEDED, ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_are_looked_into(machine):
    calls = MACHINES[machine]
    assert decide(machine, calls.clone, SIGCHLD) == decide(machine, calls.clone, 0x3D0F00) == ALLOW
    for shift in (17, *range(25, 31)):
        assert decide(machine, calls.clone, SIGCHLD | 1 << shift) == REFUSE
    assert decide(machine, calls.clone, SIGCHLD | CLONE_NEWUSER | 1 << 40) == REFUSE
    allowed = {family for family in range(64) if decide(machine, calls.socket, family, 1, 0) == ALLOW}
    assert allowed == {1, 2, 10, 16}
    assert decide(machine, calls.socket, 1 << 32 | 40, 1, 0) == REFUSE
    assert {protocol for protocol in range(32) if decide(machine, calls.socket, 16, 3, protocol) == ALLOW} == {0}
    assert {family for family in range(64) if decide(machine, calls.socketpair, family, 1, 0) == ALLOW} == {1}
    assert decide(machine, calls.ioctl, 0, 0x5412) == decide(machine, calls.ioctl, 0, 1 << 32 | 0x5412) == REFUSE
    assert decide(machine, calls.ioctl, 0, 0x541C) == REFUSE and decide(machine, calls.ioctl, 0, 0x5401) == ALLOW
    assert decide(machine, calls.personality, 0xFFFFFFFF) == ALLOW and decide(machine, calls.personality, 0x0040000) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_what_programs_can_do_without_seems_not_to_exist(machine):
    assert decide(machine, 435) == UNKNOWN
    assert decide(machine, 470) == decide(machine, 0x3FFFFFFF) == UNKNOWN
    assert decide(machine, 0x40000000) == decide(machine, 0x40000000 | 39) == decide(machine, 0xFFFFFFFF) == UNKNOWN
    for arch in (0x40000003, 0x40000028, 0xC00000B7 ^ 0xC000003E ^ MACHINES[machine].arch, 0):
        assert decide(machine, 0, arch=arch) == decide(machine, 39, arch=arch) == UNKNOWN
