"""The seccomp filter of every sandbox, as the kernel takes it: at least as strict as Docker's default profile.

What `syscalls.py` lists is allowed. A few calls are looked into: new namespaces, addresses of other families than Unix and internet
(AF_VSOCK is in no network namespace), netlink beyond reading one's own interfaces, and typing into a terminal are refused. Everything
else is EPERM; what is newer than the list, clone3 (whose flags lie in memory that a filter cannot read), and every call of another ABI of
the same machine are ENOSYS, so that programs do without.

The program is plain numbers, so that both machines are tested on either; the zygote imports this module: standard library only.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from qwengyre.sandbox.syscalls import HIGHEST, numbers

LOAD, JUMP, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word, jump always, jump on a comparison of it with a constant, end."""
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
"""Where the kernel's `struct seccomp_data` has the call's number, its ABI and its arguments (64 bits each, low half first)."""
ALLOW: Final = 0x7FFF0000
REFUSE: Final = 0x00050000 | errno.EPERM
UNKNOWN: Final = 0x00050000 | errno.ENOSYS
X32_BIT: Final = 0x40000000
"""In the numbers of the x32 ABI, which shares its name with x86-64."""
NEW_NAMESPACES: Final = 0x7E020000
"""All CLONE_NEW* flags that `clone` takes."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE: Final = 0
"""Interfaces and addresses of the sandbox's own network namespace: getifaddrs, and with it Node and Go, need it."""
PERSONALITIES: Final = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, with 32-bit addresses or an older version number, and the question which one it is: Docker's list."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Put characters into the input of a terminal."""

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if true and if false, constant."""


class Machine(NamedTuple):
    """What differs between machines: the ABI's name for the kernel, the column in `syscalls.py`, calls that are looked into."""

    arch: int
    column: int
    clone: int
    socket: int
    socketpair: int
    personality: int
    ioctl: int
    clone3: int = 435


MACHINES: Final = {
    "x86_64": Machine(0xC000003E, 0, clone=56, socket=41, socketpair=53, personality=135, ioctl=16),
    "aarch64": Machine(0xC00000B7, 1, clone=220, socket=198, socketpair=199, personality=92, ioctl=29),
}


@functools.cache
def filter_program(machine: str = platform.machine()) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises KeyError for a machine whose calls are not listed."""
    calls = MACHINES[machine]
    program = [(LOAD, 0, 0, ARCH_AT), (IF_EQUAL, 1, 0, calls.arch), _end(UNKNOWN)]
    program += [(LOAD, 0, 0, NUMBER_AT), (IF_AT_LEAST, 0, 1, X32_BIT), _end(UNKNOWN)]
    for number, rule in _rules(calls):
        program += [(IF_EQUAL, 0, len(rule), number), *rule]
    program += _tree(_ranges(numbers(calls.column)))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _end(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def _rules(calls: Machine) -> list[tuple[int, list[Instruction]]]:
    """Number of a call -> what is asked about its arguments; each rule ends in an answer."""
    internet = [(IF_EQUAL, 0, 1, family) for family in (AF_UNIX, AF_INET, AF_INET6)]
    socket = [_argument(0), *_each_allowed(internet), (IF_EQUAL, 1, 0, AF_NETLINK), _end(REFUSE)]
    return [
        (calls.clone, [_argument(0), (IF_ANY_BIT, 0, 1, NEW_NAMESPACES), _end(REFUSE), _end(ALLOW)]),
        (calls.clone3, [_end(UNKNOWN)]),
        (calls.socket, [*socket, _argument(2), *_one_of([NETLINK_ROUTE])]),
        (calls.socketpair, [_argument(0), *_one_of([AF_UNIX])]),
        (calls.personality, [_argument(0), *_one_of(PERSONALITIES)]),
        (calls.ioctl, [_argument(1), *_none_of([TIOCSTI, TIOCLINUX])]),
    ]


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: all that the kernel itself reads of an int."""
    return (LOAD, 0, 0, ARGUMENTS_AT + 8 * index)


def _each_allowed(tests: Iterable[Instruction]) -> list[Instruction]:
    return [step for test in tests for step in (test, _end(ALLOW))]


def _one_of(values: Iterable[int]) -> list[Instruction]:
    return [*_each_allowed((IF_EQUAL, 0, 1, value) for value in values), _end(REFUSE)]


def _none_of(values: Iterable[int]) -> list[Instruction]:
    return [step for value in values for step in ((IF_EQUAL, 0, 1, value), _end(REFUSE))] + [_end(ALLOW)]


def _ranges(allowed: Iterable[int]) -> list[tuple[int, int]]:
    """(first number, answer) of every stretch of numbers with one answer, from 0 on, in order.

    >>> [(first, answer == ALLOW) for first, answer in _ranges([0, 1, 5])]
    [(0, True), (2, False), (5, True), (6, False), (470, False)]
    """
    allowed = set(allowed)
    found: list[tuple[int, int]] = []
    for number in range(HIGHEST + 2):
        answer = UNKNOWN if number > HIGHEST else ALLOW if number in allowed else REFUSE
        if not found or found[-1][1] != answer:
            found.append((number, answer))
    return found


def _tree(ranges: Sequence[tuple[int, int]]) -> list[Instruction]:
    """Find the stretch of the loaded number by halving: some seven comparisons for a hundred of them."""
    if len(ranges) == 1:
        return [_end(ranges[0][1])]
    half = len(ranges) // 2
    low, high = _tree(ranges[:half]), _tree(ranges[half:])
    return [(IF_AT_LEAST, 0, 1, ranges[half][0]), (JUMP, 0, 0, len(low)), *low, *high]
