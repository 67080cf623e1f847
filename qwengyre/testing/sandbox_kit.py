"""A task, a gateway and a harness that runs whatever Python its instruction is: for tests of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from qwengyre.core.records import Outcome
from qwengyre.sandbox.config import HarnessConfig, LimitsConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.task import Task, load_task

PROBE = "qwengyre_probe_harness"
SECRET = f"key-{secrets.token_hex(8)}-of-this-execution"
"""Drawn anew by every process of tests, so that nobody finds it in another's processes."""
STARTS = ("cold", "warm")
HELLO = "open('hello', 'w').write('x')"
WAIT = "import os, urllib.request\nurllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/wait')\n"
"""Python for the probe that goes on once the test says so: see `Kit.waiting` and `Kit.go`."""
SCORE_HELLO = 'if [ -f hello ]; then echo 0.75 > "$VERIFIER_DIR/reward.txt"; else echo 0 > "$VERIFIER_DIR/reward.txt"; fi\n'


def report(code: str) -> str:
    """Python for the probe that sets `found` and leaves it where the test finds it; exits with 3, so that the workspace is kept."""
    return f"{textwrap.dedent(code)}\nimport json, sys\njson.dump(found, open('found.json', 'w'))\nsys.exit(3)\n"


class SandboxKind(Protocol):
    """What runs executions, of any kind."""

    async def run_execution(self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]]) -> Outcome: ...


class Kit:
    """Everything around one launcher, in the folder of one test."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.modules = folder / "modules"
        self.modules.mkdir(exist_ok=True)
        probe = "import os, sys\nif __name__ == '__main__':\n    exec(sys.argv[1])\n    sys.stdout.flush()\n"
        (self.modules / f"{PROBE}.py").write_text(probe)
        self.requests: list[bytes] = []
        self.sleep = f"sleep 3141.{secrets.randbelow(10**12):012}"
        """A command that does not end, and that no other test on this machine runs: see `processes_with`."""
        self.waiting, self.go = asyncio.Event(), asyncio.Event()
        """A harness has come to `WAIT`; it may go on."""

    def task(self, instruction: str, test_sh: str = SCORE_HELLO, *, toml: str = "", files: dict[str, str] | None = None) -> Task:
        folder = self.folder / "tasks" / "hello"
        for path, text in {
            "task.toml": f'version = "1.0"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n{toml}',
            "instruction.md": instruction,
            "tests/test.sh": test_sh,
            "environment/data.txt": "data\n",
            **(files or {}),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return load_task(folder)

    def config(self, start: str = "cold", **settings: Any) -> HarnessConfig:
        limits = LimitsConfig(**{"best_effort": True, **settings.pop("limits", {})})
        return msgspec.structs.replace(
            HarnessConfig(
                command=("python3", "-m", PROBE, "{instruction}"),
                env={"PYTHONPATH": str(self.modules)},
                warm_start=start == "warm",
                limits=limits,
            ),
            **settings,
        )

    @contextlib.asynccontextmanager
    async def launcher(self, config: HarnessConfig) -> AsyncIterator[Any]:  # of a kind that the test knows
        """Serve a gateway that echoes request bodies, and open a launcher."""
        with tempfile.TemporaryDirectory(prefix="qg-", dir="/tmp") as folder:  # a test's own may be too long for a socket
            async with self._launcher(config, Path(folder) / "s") as launcher:
                yield launcher

    @contextlib.asynccontextmanager
    async def runs(self, config: HarnessConfig, gateway: GatewayAddress) -> AsyncIterator[SandboxKind]:
        """What runs executions: another kind replaces this."""
        async with Launcher(config, [gateway], work=self.folder / "work", failed=self.folder / "failed") as launcher:
            yield launcher

    @contextlib.asynccontextmanager
    async def _launcher(self, config: HarnessConfig, socket: Path) -> AsyncIterator[SandboxKind]:
        os.umask(0)  # the kit's gateways have sockets that every user may open, as the real one has
        over_unix = await asyncio.start_unix_server(self.answer, str(socket), limit=2**24)
        over_tcp = await asyncio.start_server(self.answer, "127.0.0.1", 0, limit=2**24)
        url = f"http://127.0.0.1:{over_tcp.sockets[0].getsockname()[1]}"
        gateway = GatewayAddress(str(socket), url)
        async with over_unix, over_tcp, self.runs(config, gateway) as launcher:
            try:
                yield launcher
            finally:
                self.go.set()
                self.go.clear()  # who was killed while it waited is answered in vain

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the body of one request back."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            length = next(
                (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0
            )
            body = await reader.readexactly(length)
            if b"/wait " in head.partition(b"\r\n")[0]:
                self.waiting.set()
                await self.go.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def run(self, task: Task, config: HarnessConfig | None = None, *, num_calls: int = 1, name: str = "e000001-0") -> Outcome:
        """Run one execution and return how it ended."""

        async def execute() -> Outcome:
            async with self.launcher(config or self.config()) as launcher:
                outcome: Outcome = await launcher.run_execution(spec(task, name), calls(num_calls))
                return outcome

        return asyncio.run(execute())

    def found(self, code: str, config: HarnessConfig) -> Any:
        """What the probe reports from inside a sandbox."""
        outcome = self.run(self.task(report(code)), config)
        place = self.folder / "failed" / "e000001-0.0" / "workspace" / "found.json"
        assert place.exists(), outcome.detail
        return json.loads(place.read_text())


def spec(task: Task, name: str = "e000001-0") -> ExecutionSpec:
    return ExecutionSpec(name, task, SECRET, base_path="/x/1")


def calls(number: int) -> Callable[[], Awaitable[int]]:
    async def num_calls() -> int:
        return number

    return num_calls


def processes_with(marker: str) -> list[str]:
    """Command lines of this machine's processes that hold `marker`, which is this test's alone."""
    return list(_processes_with(marker).values())


def wait_for_the_end_of(marker: str) -> None:
    """Return once no process has `marker` in its command line any more."""
    while pids := list(_processes_with(marker)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                select.select([fd], [], [])
                os.close(fd)


def _processes_with(marker: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found[int(folder.name)] = line
    return found


PYTHON = sys.executable
