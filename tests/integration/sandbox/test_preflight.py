"""What is refused before anything is dispatched, with what to change."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from qwengyre.core.errors import ConfigError, SandboxError
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.preflight import check_harness
from qwengyre.testing.sandbox_kit import HELLO

pytestmark = pytest.mark.integration


async def test_a_socket_beside_others_is_refused(kit):
    async with kit.launcher(kit.config()) as launcher:
        (Path(launcher.gateways[0].socket).parent / "control.sock").touch()
        with pytest.raises(SandboxError, match=r"also holds control\.sock"):
            Launcher(launcher.config, launcher.gateways, work=kit.folder / "work2", failed=kit.folder / "failed2")


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


def test_every_folder_that_is_not_there_is_named(kit, tmp_path):
    config = msgspec.structs.replace(kit.config(), readable=(str(tmp_path), "/opt/no-such-one", "/opt/no-such-other"))
    with pytest.raises(ConfigError) as caught:
        check_harness(config)
    assert [str(mistake).partition(":")[0] for mistake in caught.value.mistakes] == ["harness.readable"] * 2
    assert "no-such-one does not exist" in str(caught.value) and "no-such-other does not exist" in str(caught.value)


def test_a_harness_that_cannot_be_started_here_is_refused(kit, monkeypatch, tmp_path):
    hidden = tmp_path / "agent"
    hidden.write_text("#!/bin/sh\n")
    hidden.chmod(0o755)
    for command, reason in ((("no-such-agent",), "does not exist"), ((str(hidden),), "not in the sandbox")):
        with pytest.raises(ConfigError, match=reason):
            check_harness(msgspec.structs.replace(kit.config(), command=command))
    check_harness(msgspec.structs.replace(kit.config(), command=(str(hidden),), readable=(str(tmp_path),)))
    hidden.chmod(0o644)
    script = tmp_path / "agent.py"
    script.touch()
    for command, reason in (
        ((str(hidden),), "may not be executed: chmod"),
        ((str(tmp_path),), "is a folder"),
        (("python3", str(script), "{instruction}"), r"agent\.py is not in the sandbox: add it"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_harness(msgspec.structs.replace(kit.config(), command=command))
    check_harness(msgspec.structs.replace(kit.config(), command=("python3", str(script)), readable=(str(script),)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"in its own workspace, where agent.py is not: write {script}"):
        check_harness(msgspec.structs.replace(kit.config(), command=("python3", "agent.py")))
    hidden.chmod(0o755)
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


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("python3", "/opt/no/such/agent.py", "{instruction}"), "/opt/no/such/agent.py does not exist"),
        (("/usr/bin/python3", "-u", "/opt/no/such/agent.py"), "/opt/no/such/agent.py does not exist"),
        (("bash", "/opt/no/such/run.sh"), "/opt/no/such/run.sh does not exist"),
        (("python3", "no_such_agent.py"), "no_such_agent.py does not exist: it was looked for in"),
        (("python3", "/workspace/no_such_agent.py"), "/workspace/no_such_agent.py does not exist"),
        (("python3", "/tmp/no_such_agent.py"), "/tmp/no_such_agent.py does not exist"),
        (("/usr/bin/python3", "-m", "no_such_module.cli"), "finds no module no_such_module.cli in the sandbox"),
        (("bash", "-c", "no-such-agent --task x"), "no-such-agent, which the shell is to start, is not in the sandbox"),
        (("bash", "-lc", "LANG=C /opt/no/such/agent"), "/opt/no/such/agent, which the shell is to start"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_an_interpreter_is_to_run_must_be_there(kit, tmp_path, command, reason):
    (tmp_path / "environment").mkdir()
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_harness(msgspec.structs.replace(kit.config(), command=command), [tmp_path / "environment"])


@pytest.mark.parametrize(
    "command",
    [
        ("python3", "agent.py"),
        ("python3", "/app/agent.py"),
        ("python3", "/workspace/agent.py"),
        ("/usr/bin/python3", "-m", "agent"),
        ("/usr/bin/python3", "-m", "json.tool"),
        ("bash", "-c", "if true; then ls; fi"),
        ("bash", "-c", "cd sub && ./own.sh"),
        ("bash", "-c", "./own.sh"),
        ("python3", "{workspace}/agent.py"),
    ],
    ids=" ".join,
)
def test_what_a_task_brings_and_what_a_shell_knows_is_there(kit, tmp_path, command):
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "agent.py").touch()
    check_harness(msgspec.structs.replace(kit.config(), command=command), [tmp_path / "other", tmp_path / "environment"])


def test_a_module_in_the_pythonpath_of_the_harness_is_there(kit, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").touch()
    config = kit.config(readable=(str(tmp_path),), env={"PYTHONPATH": f"{tmp_path}/own"})
    check_harness(msgspec.structs.replace(config, command=("/usr/bin/python3", "-m", "mine")))


def test_a_readable_folder_that_shows_other_workspaces_is_refused(kit):
    with pytest.raises(SandboxError, match=r"harness\.readable"):
        kit.run(kit.task(HELLO), kit.config(readable=(str(kit.folder),)))
