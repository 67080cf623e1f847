"""Children come up or say why not, and end with their parent however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwengyre.core.errors import ProcessFailed
from qwengyre.rpc.processes import start_process
from qwengyre.rpc.tether import tethered

TIMEOUT_S = 120.0
SLEEPER = "tests.unit.rpc.sleeper"

PARENT = f"""
import asyncio, pathlib, sys
from qwengyre.rpc.processes import start_process
async def main():
    folder = pathlib.Path(sys.argv[1])
    child = await start_process({SLEEPER!r}, [str(folder / "ready")], folder / "log", folder / "ready", env={{}}, timeout_s={TIMEOUT_S})
    print(child.pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Stopped counts, a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("is_stalled", [False, True], ids=["alive", "stalled"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_child_ends_with_its_parent(tmp_path: Path, how: signal.Signals, is_stalled: bool):
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        if is_stalled:
            os.kill(pid, signal.SIGSTOP)
        parent.send_signal(how)
    while is_running(pid):
        os.sched_yield()


def test_a_child_whose_parent_has_ended_before_does_not_begin(tmp_path: Path):
    command = tethered(SLEEPER, [str(tmp_path / "ready")])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command).returncode == 1
    assert not (tmp_path / "ready").exists()


async def test_a_child_that_does_not_come_up_says_why(tmp_path: Path):
    async def start(module: str, timeout_s: float) -> None:
        await start_process(
            module, [str(tmp_path / "elsewhere")], tmp_path / "log", tmp_path / "ready", env={}, timeout_s=timeout_s
        )

    with pytest.raises(ProcessFailed, match=r"(?s)log: ended with exit code 1 .*No module named"):
        await start("qwengyre.nowhere", TIMEOUT_S)
    with pytest.raises(ProcessFailed, match=r"did not serve within 0.05 s"):
        await start(SLEEPER, 0.05)
