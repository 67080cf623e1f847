"""The real Harbor on podman: two of its agents, its separate verifier, what is killed. `make test-harbor`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from qwengyre.core.ids import LocalPath
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harbor.check import check_harbor
from qwengyre.sandbox.harbor.config import HarborConfig
from qwengyre.sandbox.harbor.launcher import HarborLauncher, TrialFolders
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.task import Task, load_task
from qwengyre.testing.images import small_root

PYTHON = Path(".harbor/bin/python").absolute()
PROGRAMS = [
    "bash",
    "sh",
    "cat",
    "ls",
    "mkdir",
    "rm",
    "chmod",
    "chown",
    "sleep",
    "tar",
    "find",
    "mv",
    "cp",
    "id",
    "stat",
    "touch",
    "tee",
    "test",
    "env",
    "true",
]
"""What Harbor runs in an environment, and the tasks here."""
BASE = "localhost/qwengyre-test-harbor"
CONF = """[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
"""For machines with a hybrid of cgroups, where podman's own runtime cannot set limits."""
PROBE = '''
from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import NonZeroAgentExitCodeError


class Probe(BaseAgent):
    """Runs its instruction as a script in the environment."""

    @staticmethod
    def name():
        return "probe"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        done = await environment.exec(instruction, cwd="/app", env=self.extra_env)
        if done.return_code:
            raise NonZeroAgentExitCodeError(f"exit code {done.return_code}: {done.stdout} {done.stderr}")
'''
TOML = """version = "1.0"
artifacts = ["/app"]
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
environment_mode = "separate"
"""
SCORE = """mkdir -p /logs/verifier
[ -e /tmp/left ] && exit 1
if [ -f /app/hello ]; then echo 0.75; else echo 0; fi > /logs/verifier/reward.txt
"""


def engine(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An image of programs of this machine, from no registry."""
    folder = tmp_path_factory.mktemp("image")
    root = small_root(folder / "root", [name for name in PROGRAMS if shutil.which(name, path="/bin:/usr/bin")])
    packed = subprocess.Popen(["tar", "--directory", str(root), "--create", "."], stdout=subprocess.PIPE)
    subprocess.run(["podman", "import", "--quiet", "-", BASE], stdin=packed.stdout, check=True, capture_output=True)
    patch = pytest.MonkeyPatch()
    if subprocess.run(["podman", "run", "--rm", BASE, "/bin/bash", "-c", "true"], capture_output=True).returncode:
        (folder / "containers.conf").write_text(CONF)
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        engine("run", "--rm", BASE, "/bin/bash", "-c", "true")
    yield
    patch.undo()


class Podman:
    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "modules").mkdir()
        (folder / "modules" / "probe_agent.py").write_text(PROBE)

    def config(self, agent: str = "probe_agent:Probe") -> HarborConfig:
        modules = (LocalPath(str(self.folder / "modules")),)
        return HarborConfig(python=LocalPath(str(PYTHON)), agent=agent, environment="podman", path=modules)

    def task(self, name: str, script: str) -> Task:
        folder = self.folder / "tasks" / name
        for path, text in {
            "task.toml": TOML,
            "instruction.md": script,
            "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
            "tests/test.sh": f"#!/bin/bash\n{SCORE}",
            "solution/solve.sh": "#!/bin/bash\necho x > /app/hello\n",
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return load_task(folder)

    def launcher(self, config: HarborConfig, **settings: float) -> HarborLauncher:
        folders = TrialFolders(self.folder / "work", self.folder / "kept", None, self.folder / "trial-host.log")
        gateway = GatewayAddress("", "http://host.containers.internal:8400")
        return HarborLauncher(config, HarnessConfig(**settings), [gateway], folders, max_agents=8)

    def containers(self, launcher: HarborLauncher) -> list[str]:
        names = [name for one in json.loads(engine("ps", "--all", "--format", "json")) for name in one["Names"]]
        return [name for name in names if launcher.run_name in name]


@pytest.fixture
def podman(tmp_path: Path) -> Podman:
    return Podman(tmp_path)


def spec(task: Task) -> ExecutionSpec:
    return ExecutionSpec(f"{task.name}-0", task, "the-key", base_path="/x/1")


def called() -> Callable[[], Awaitable[int]]:
    async def one() -> int:
        return 1

    return one


@pytest.mark.timeout(900)
async def test_ends_on_podman(podman: Podman):
    scripts = {
        "does": 'echo x > hello; echo x > /tmp/left; [ "$OPENAI_API_KEY" = the-key ]',
        "fails": "exit 7",
        "hangs": "echo x > hello; sleep 3600",
    }
    async with podman.launcher(podman.config(), timeout_s=20.0) as launcher:
        running = [launcher.run_execution(spec(podman.task(*one)), called()) for one in scripts.items()]
        found: dict[str, Outcome] = dict(zip(scripts, await asyncio.gather(*running), strict=True))
        assert podman.containers(launcher) == []
    told = {name: (one.end, one.validity, one.score) for name, one in found.items()}
    assert told == {
        "does": (End.EXITED, Validity.VALID, 0.75),
        "fails": (End.CRASHED, Validity.VALID, 0.0),
        "hangs": (End.HARNESS_TIMEOUT, Validity.VALID, 0.75),
    }, {name: one.detail for name, one in found.items()}


@pytest.mark.timeout(600)
async def test_another_agent(podman: Podman):
    async with podman.launcher(podman.config("oracle")) as launcher:
        outcome = await launcher.run_execution(spec(podman.task("solved", "write hello")), called())
    assert (outcome.end, outcome.score) == (End.EXITED, 0.75), outcome.detail


@pytest.mark.timeout(600)
async def test_a_killed_trial_leaves_no_container(podman: Podman):
    async with podman.launcher(podman.config()) as launcher:
        running = asyncio.create_task(launcher.run_execution(spec(podman.task("hangs", "sleep 3600")), called()))
        while not podman.containers(launcher):
            await asyncio.sleep(0.2)
        host = launcher._host._process.pid
        [trial] = [int(child) for child in Path(f"/proc/{host}/task/{host}/children").read_text().split()]
        os.kill(trial, signal.SIGKILL)
        assert (await running).end is End.LOST
        assert podman.containers(launcher) == []


@pytest.mark.parametrize("agent", ["terminus-2", "claude-code", "codex", "mini-swe-agent", "aider"])
def test_agents_by_name(podman: Podman, agent: str):
    assert check_harbor(podman.config(agent)).startswith("0.2")
