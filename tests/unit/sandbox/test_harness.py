"""Commands, environments and the view of a sandbox."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import SandboxError
from qwengyre.rpc.logs import log_tail
from qwengyre.sandbox.config import HarnessConfig, LimitsConfig
from qwengyre.sandbox.harness import (
    PATIENCE,
    RESERVED,
    ExecutionSpec,
    GatewayAddress,
    HarnessFiles,
    harness_command,
    harness_environment,
)
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import Mount, SandboxView, bwrap_arguments, outermost
from qwengyre.sandbox.spaces import FolderSpace
from qwengyre.sandbox.task import Task

TASK = Task("hello", "/tasks/hello", "do {model} and {workspace}", 1.0, 1.0, agent_env={"A": "task", "B": "task"})
SPEC = ExecutionSpec("e000001-0", TASK, "secret", base_path="/x/7", model="m")


def files(folder: Path) -> HarnessFiles:
    return HarnessFiles(folder, FolderSpace(folder, LimitsConfig()))


@pytest.fixture
def host(tmp_path):
    config = HarnessConfig(
        command=("agent", "{instruction}", "--file={instruction_file}", "{model}:{workspace}"),
        isolation="none",
        env={"B": "config", "OPENAI_API_KEY": "stolen"},
    )
    host = SandboxHost(config, tmp_path)
    yield host
    host.close()


def test_placeholders_are_filled_once(host, tmp_path):
    command = harness_command(host, SPEC, files(tmp_path / "e"))
    assert command == ["agent", TASK.instruction, f"--file={tmp_path}/e/instruction.md", f"m:{tmp_path}/e/workspace"]


def test_the_environment_is_made_not_inherited(host, tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "x")
    environment = harness_environment(host, GatewayAddress("/s", "http://127.0.0.1:9/"), SPEC, files(tmp_path / "e"))
    assert "HOST_SECRET" not in environment
    assert (environment["A"], environment["B"]) == ("task", "config")
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:9/x/7/v1"
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/x/7"
    assert environment["GOOGLE_GEMINI_BASE_URL"] == environment["ANTHROPIC_BASE_URL"]
    assert environment["GEMINI_API_KEY"] == environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == "secret"
    assert environment["API_TIMEOUT_MS"] == "3600000"


def test_what_every_execution_gets_for_itself_is_what_a_run_may_not_set(host, tmp_path):
    plain = host.environment(host.home(tmp_path / "e"))
    config = msgspec.structs.replace(host.config, env=dict.fromkeys(RESERVED, "mine"))
    environment = harness_environment(
        SandboxHost(config, tmp_path), GatewayAddress("/s", "http://127.0.0.1:9/"), SPEC, files(tmp_path)
    )
    assert "mine" not in environment.values()
    assert environment.keys() - plain.keys() - PATIENCE.keys() - SPEC.task.agent_env.keys() == RESERVED - plain.keys()


def test_no_address_without_isolation_is_refused(host, tmp_path):
    with pytest.raises(SandboxError, match="TCP port"):
        harness_environment(host, GatewayAddress("/s"), SPEC, files(tmp_path / "e"))


def test_a_spec_does_not_show_its_key():
    assert "secret" not in repr(SPEC) and "secret" not in f"{msgspec.structs.replace(SPEC, attempt=2)}"


def test_a_log_tail_is_short_and_without_the_key(tmp_path):
    (tmp_path / "log").write_bytes(b"start" + b"x" * 5000 + b"\xff key=secret end\n")
    tail = log_tail(tmp_path / "log", secret="secret")
    assert tail.endswith("key=<key> end") and len(tail) < 2100 and "start" not in tail
    assert log_tail(tmp_path / "missing") == ""


def test_outermost_folders():
    assert outermost(["/opt/a", "/opt/a/b", "/opt/ab", "/usr/lib/x", "/opt/a"]) == ["/opt/a", "/opt/ab"]


def test_the_view_is_all_that_a_sandbox_sees(tmp_path):
    view = SandboxView(
        (Mount("/host/w", "/workspace", writable=True), Mount("/host/i", "/run/i")), ("/opt/agent",), str(tmp_path), 16
    )
    arguments = bwrap_arguments("bwrap", view)
    for flag in (
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--disable-userns",
        "--die-with-parent",
    ):
        assert flag in arguments
    assert "--share-net" not in arguments and arguments[-1] == "--"
    writable = [arguments[i + 1 : i + 3] for i, flag in enumerate(arguments) if flag == "--bind"]
    assert writable == [["/host/w", "/workspace"]]
    readable = {arguments[i + 1] for i, flag in enumerate(arguments) if flag == "--ro-bind"}
    expected = {"/usr", "/opt/agent", "/host/i"}
    assert expected <= readable and all(
        path in expected or path.startswith(("/etc/", f"{tmp_path}/", "/lib", "/bin", "/sbin")) for path in readable
    )
    assert arguments.index("/usr") < arguments.index("/opt/agent") < arguments.index("/host/w")


def test_a_module_that_is_not_installed_is_refused(tmp_path):
    config = HarnessConfig(command=("python3", "-m", "no_such_module_anywhere"), isolation="none")
    with pytest.raises(SandboxError, match="no_such_module_anywhere is not installed"):
        SandboxHost(config, Path(tmp_path))
