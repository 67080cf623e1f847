"""Trials of Harbor, by the real trial host: ends, what is killed, what is secret, what is refused."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from qwengyre.core.errors import ConfigError, SandboxError
from qwengyre.core.ids import LocalPath
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox.harbor import trial_host
from qwengyre.sandbox.harbor.check import check_harbor
from qwengyre.sandbox.process import wait_readable
from qwengyre.sandbox.task import load_task
from qwengyre.testing.harbor_kit import HarborKit, install
from qwengyre.testing.sandbox_kit import (
    HELLO,
    SCORE_HELLO,
    SECRET,
    WAIT,
    calls,
    processes_with,
    report,
    spec,
    wait_for_the_end_of,
)

FAKE_HARBOR = Path(__file__).parents[2] / "fake_harbor"
BROKEN = "exit 1\n"
"""A verifier that gives no reward."""


@pytest.fixture
def kit(tmp_path: Path) -> HarborKit:
    return HarborKit(tmp_path, FAKE_HARBOR)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TestEnds:
    def test_a_trial_that_harbor_cannot_make(self, kit: HarborKit):
        kit.with_harbor(environment_kwargs={"marks": 5})
        outcome = kit.run(kit.task(HELLO))
        assert (outcome.end, outcome.validity) == (End.SETUP_FAILED, Validity.PLACEHOLDER)
        assert "TypeError" in outcome.detail

    def test_an_environment_that_cannot_be_started(self, kit: HarborKit):
        kit.with_harbor(environment_kwargs={"fails": "env"})
        outcome = kit.run(kit.task(HELLO))
        assert (outcome.end, outcome.validity) == (End.SETUP_FAILED, Validity.PLACEHOLDER)
        assert "SandboxBuildFailedError: as the test wants it" in outcome.detail

    def test_an_agent_that_cannot_be_installed_in_time(self, kit: HarborKit):
        sleep = kit.sleep.split()[1]
        kit.with_harbor(agent_kwargs={"setup": f"import subprocess; subprocess.run(['sleep', '{sleep}'])"}, start_timeout_s=1.0)
        outcome = kit.run(kit.task(HELLO))
        assert (outcome.end, outcome.validity) == (End.SETUP_FAILED, Validity.PLACEHOLDER)
        assert "sandbox.harbor.start_timeout_s" in outcome.detail
        wait_for_the_end_of(sleep)

    @pytest.mark.parametrize(
        ("error", "end", "validity"),
        [
            ("SSHAccessError", End.SETUP_FAILED, Validity.PLACEHOLDER),
            ("AgentAuthenticationError", End.CRASHED, Validity.VALID),  # Harbor grades it not; we do
            ("ContextLengthExceededError", End.CRASHED, Validity.VALID),
        ],
    )
    def test_what_ends_an_agent(self, kit: HarborKit, error: str, end: End, validity: Validity):
        kit.with_harbor(agent_kwargs={"raises": error})
        outcome = kit.run(kit.task(HELLO))
        assert (outcome.end, outcome.validity, outcome.score) == (end, validity, 0.0), outcome.detail
        assert error in outcome.detail

    def test_no_call_is_no_evaluation(self, kit: HarborKit):
        outcome = kit.run(kit.task(HELLO), num_calls=0)
        assert (outcome.end, outcome.validity) == (End.NEVER_CALLED, Validity.DROPPED)
        assert "gateway.public_url" in outcome.detail

    def test_calls_are_counted_after_the_agent_and_before_its_verifier(self, kit: HarborKit):
        seen: list[int] = []

        async def execute() -> Outcome:
            async def num_calls() -> int:
                seen.append(len(list(kit.folder.glob("work/*/*/verifier"))))
                return 1

            async with kit.launcher(kit.config()) as launcher:
                return await launcher.run_execution(spec(kit.task(HELLO)), num_calls)

        assert asyncio.run(execute()).score == 0.75
        assert seen == [0]

    def test_overall_timeout_counts_from_the_agents_start(self, kit: HarborKit):
        kit.with_harbor(agent_kwargs={"setup": "import time; time.sleep(1.5)"})
        sleep = kit.sleep
        task = kit.task(f"import subprocess; subprocess.run('{sleep}'.split())")
        outcome = kit.run(task, kit.config(overall_timeout_s=1.0))
        assert (outcome.end, outcome.validity) == (End.OVERALL_TIMEOUT, Validity.DROPPED)
        assert "harness.overall_timeout_s" in outcome.detail
        wait_for_the_end_of(sleep)

    def test_a_shared_verifier_is_refused(self, kit: HarborKit):
        task = kit.task(HELLO)
        toml = Path(task.folder) / "task.toml"
        toml.write_text(toml.read_text().replace("separate", "shared"))
        outcome = kit.run(load_task(Path(task.folder)))
        assert (outcome.end, outcome.validity) == (End.SETUP_FAILED, Validity.PLACEHOLDER)
        assert "can write its own reward" in outcome.detail


class TestVerifier:
    def test_it_is_run_again_on_what_the_agent_left(self, kit: HarborKit):
        times = f'echo x >> {kit.folder}/times; [ "$(wc -l < {kit.folder}/times)" = 3 ] || exit 1\n'
        outcome = kit.run(kit.task(HELLO, times + SCORE_HELLO))
        assert (outcome.end, outcome.score, outcome.evaluator_tries) == (End.EXITED, 0.75, 3), outcome.detail

    def test_one_that_scores_nobody_is_broken(self, kit: HarborKit):
        outcome = kit.run(kit.task(HELLO, BROKEN), kit.config(evaluator_tries=2))
        assert (outcome.end, outcome.validity, outcome.evaluator_tries) == (End.EVALUATOR_FAILED, Validity.DROPPED, 2)
        assert "RewardFileNotFoundError" in outcome.detail

    def test_who_breaks_one_that_works_has_the_lowest_score(self, kit: HarborKit):
        outcome = kit.run(kit.task("open('bad', 'w')", f"[ -e bad ] && exit 1\n{SCORE_HELLO}"), kit.config(evaluator_tries=2))
        assert (outcome.end, outcome.validity, outcome.score) == (End.EXITED, Validity.VALID, 0.0)
        assert outcome.detail.startswith("scored 0: of what this agent left")

    def test_one_whose_environment_fails_blames_nobody(self, kit: HarborKit):
        kit.with_harbor(environment_kwargs={"fails": "verifier"})
        outcome = kit.run(kit.task(HELLO), kit.config(evaluator_tries=2))
        assert (outcome.end, outcome.validity) == (End.EVALUATOR_FAILED, Validity.DROPPED)

    @pytest.mark.parametrize("reward", ["7", "nan", "much"])
    def test_a_reward_that_is_none(self, kit: HarborKit, reward: str):
        outcome = kit.run(kit.task(HELLO, f'echo {reward} > "$VERIFIER_DIR/reward.txt"\n'), kit.config(evaluator_tries=1))
        assert (outcome.end, outcome.validity) == (End.EVALUATOR_FAILED, Validity.DROPPED), outcome.detail


class TestKills:
    async def test_a_killed_trial_host_loses_its_executions_and_is_replaced(self, kit: HarborKit):
        waiting, hello = kit.task(WAIT), SCORE_HELLO
        async with kit.launcher(kit.config()) as launcher:
            first = asyncio.create_task(launcher.run_execution(spec(waiting), calls(1)))
            await kit.waiting.wait()
            host = launcher._host._process.pid
            [trial] = children_of(host)
            os.kill(host, signal.SIGKILL)
            outcome = await first
            assert (outcome.end, outcome.validity) == (End.LOST, Validity.DROPPED)
            fd = os.pidfd_open(trial)
            await wait_readable(fd)
            os.close(fd)
            assert list(kit.marks.iterdir()) == []
            second = await launcher.run_execution(spec(kit.task(HELLO, hello), "e000002-0"), calls(1))
            assert second.score == 0.75

    async def test_a_killed_trial_is_lost_and_its_environment_taken_down(self, kit: HarborKit):
        async with kit.launcher(kit.config()) as launcher:
            first = asyncio.create_task(launcher.run_execution(spec(kit.task(WAIT)), calls(1)))
            await kit.waiting.wait()
            assert len(list(kit.marks.iterdir())) == 1
            [trial] = children_of(launcher._host._process.pid)
            os.kill(trial, signal.SIGKILL)
            outcome = await first
            assert (outcome.end, outcome.validity) == (End.LOST, Validity.DROPPED)
            assert "ended with 137" in outcome.detail
            assert list(kit.marks.iterdir()) == []

    async def test_cancelling_takes_the_environment_down(self, kit: HarborKit):
        async with kit.launcher(kit.config()) as launcher:
            first = asyncio.create_task(launcher.run_execution(spec(kit.task(WAIT)), calls(1)))
            await kit.waiting.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert first.cancelled()
            assert list(kit.marks.iterdir()) == []
        assert list((kit.folder / "work").iterdir()) == []

    async def test_agents_take_turns_and_others_get_ready_meanwhile(self, kit: HarborKit):
        kit.max_agents = 1
        task = kit.task(WAIT)
        async with kit.launcher(kit.config()) as launcher:
            both = [asyncio.create_task(launcher.run_execution(spec(task, f"e00000{i}-0"), calls(1))) for i in (1, 2)]
            await kit.waiting.wait()
            while len(list(kit.marks.iterdir())) < 2:
                await asyncio.sleep(0.05)
            assert len(kit.requests) == 1
            kit.go.set()
            await asyncio.gather(*both)
            assert len(kit.requests) == 2


class TestSecrets:
    async def test_a_key_is_in_no_argument_and_not_in_the_hosts_own_variables(self, kit: HarborKit):
        async with kit.launcher(kit.config()) as launcher:
            first = asyncio.create_task(launcher.run_execution(spec(kit.task(WAIT)), calls(1)))
            await kit.waiting.wait()
            assert processes_with(SECRET) == []
            assert SECRET.encode() not in Path(f"/proc/{launcher._host._process.pid}/environ").read_bytes()
            kit.go.set()
            await first
        kept = [path for path in kit.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        assert kept == []

    def test_an_agent_has_no_key_of_the_users(self, kit: HarborKit, monkeypatch: pytest.MonkeyPatch):
        for name in ("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY"):
            monkeypatch.setenv(name, "the-users-own")
        outcome = kit.run(kit.task(report("import os; found = dict(os.environ)")))
        [place] = (kit.folder / "failed").rglob("found.json") or [None]
        assert place is not None, outcome.detail
        assert "the-users-own" not in place.read_text()


class TestBadInput:
    def refusal(self, kit: HarborKit, **changes: Any) -> str:
        kit.with_harbor(**changes)
        with pytest.raises(ConfigError) as caught:
            check_harbor(kit.harbor)
        return str(caught.value)

    def test_a_good_one(self, kit: HarborKit):
        assert check_harbor(kit.harbor) == "0.26.0"

    def test_no_interpreter(self, kit: HarborKit):
        assert "sandbox.harbor.python: /no/python is no program" in self.refusal(kit, python="/no/python")

    def test_no_harbor(self, kit: HarborKit):
        assert "has no Harbor: " in self.refusal(kit, path=())

    @pytest.mark.parametrize("version", ["0.24.9", "0.27.0", "1.0"])
    def test_a_version_that_is_not_known(self, kit: HarborKit, version: str):
        site = install(FAKE_HARBOR, kit.folder / "other", version)
        assert f"has Harbor {version}; 0.25 and 0.26" in self.refusal(kit, path=(LocalPath(str(site)),))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"agent": "probee"}, "sandbox.harbor.agent: Agent name probee is not valid"),
            ({"agent_kwargs": {"colour": 1}}, "sandbox.harbor.agent_kwargs: Invalid kwargs for agent: Unknown option 'colour'"),
            ({"environment": "dockr"}, "sandbox.harbor.environment: Harbor 0.26.0 has no 'dockr': it has docker, podman"),
            ({"environment": "podman", "environment_kwargs": {}}, "sandbox.harbor.environment: podman is not installed"),
            ({"environment": "there:There"}, "sandbox.harbor.environment: Failed to import environment 'there:There'"),
            ({"environment_kwargs": {"colour": 1}}, "Unknown option 'colour'"),
        ],
    )
    def test_what_harbor_refuses_has_its_key(self, kit: HarborKit, changes: dict[str, Any], reason: str):
        assert reason in self.refusal(kit, **changes)

    def test_a_folder_of_packages_that_is_none(self, kit: HarborKit):
        assert "sandbox.harbor.path: /no/folder is not a folder" in self.refusal(kit, path=(LocalPath("/no/folder"),))

    def test_an_interpreter_that_dies(self, kit: HarborKit):
        kit.with_harbor(python=LocalPath(shutil.which("false") or "/bin/false"))
        with pytest.raises(SandboxError, match="did not start Harbor"):
            check_harbor(kit.harbor)


def test_the_trial_host_imports_nothing_of_ours():
    tree = ast.parse(Path(trial_host.__file__).read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    foreign = {str(name).split(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign == {"harbor"}
