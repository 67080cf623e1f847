"""What a task or a policy may put into variables reaches no process outside of the sandbox, and no key lies about in it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from qwengyre.testing.sandbox_kit import HELLO, SECRET, WAIT, calls, spec

pytestmark = pytest.mark.integration


def test_no_variable_of_a_task_reaches_a_program_of_the_host(kit, start):
    """The loader of every program that is started with LD_DEBUG_OUTPUT writes files with that name: outside, if it runs outside."""
    trace = kit.folder / "trace"
    commanding = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(trace), "LD_PRELOAD": "./evil.so", "BASH_ENV": "./evil.sh"}
    task = msgspec.structs.replace(kit.task(HELLO), agent_env=commanding, verifier_env=commanding)
    outcome = kit.run(task, kit.config(start))
    assert outcome.score == 0.75, outcome.detail
    assert list(kit.folder.glob("trace*")) == []


async def test_bubblewrap_has_no_variable_and_no_option_of_a_task(kit, start):
    async with kit.launcher(kit.config(start)) as launcher, asyncio.TaskGroup() as group:
        task = msgspec.structs.replace(kit.task(HELLO + "\n" + WAIT), agent_env={"COLOR": "quite-red"})
        group.create_task(launcher.run_execution(spec(task), calls(1)))
        await kit.waiting.wait()
        found = [(read(pid, "environ"), read(pid, "cmdline")) for pid in own_bubblewraps()]
        kit.go.set()
    assert found and all(environ == b"" and b"quite-red" not in cmdline for environ, cmdline in found)


def test_the_first_process_of_a_sandbox_does_not_know_the_key(kit, start):
    """A tool that the harness starts with an empty environment, as an agent's shell may, finds no key in process 1."""
    tool = f"""
import os
def files():
    for name in ("environ", "cmdline"):
        yield "/proc/1/" + name
    for name in os.listdir("/proc/1/fd"):
        yield "/proc/1/fd/" + name
found = []
for path in files():
    try:
        if os.path.isfile(path) and {SECRET!r}.encode() in open(path, "rb").read():
            found.append(path)
    except OSError:
        pass
try:
    with open("/proc/1/mem", "rb", 0) as memory:
        for line in open("/proc/1/maps"):
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            if "w" in line.split()[1]:
                memory.seek(low)
                found += ["mem"] * ({SECRET!r}.encode() in memory.read(high - low))
except OSError:
    pass
print(found)
"""
    code = f"import subprocess, sys\nfound = subprocess.run([sys.executable, '-c', {tool!r}], env={{}}, capture_output=True, text=True).stdout"
    assert kit.found(code, kit.config(start)) == "[]\n"


def own_bubblewraps() -> list[str]:
    """Processes that this one started as bubblewrap."""
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_own_bubblewrap(entry.name)]


def is_own_bubblewrap(pid: str) -> bool:
    try:
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")
    except OSError:
        return False
    return fields[0].endswith("(bwrap") and int(fields[2].split()[1]) == os.getpid()


def read(pid: str, name: str) -> bytes:
    return Path("/proc", pid, name).read_bytes()
