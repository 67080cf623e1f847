"""One trial, in the order of Harbor's SingleStepTrial."""

from __future__ import annotations

import asyncio
import shutil
import tomllib
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.factory import environment_class
from harbor.models.trial.config import TrialConfig


class AgentTimeoutError(asyncio.TimeoutError):
    pass


class VerifierTimeoutError(asyncio.TimeoutError):
    pass


class RewardFileNotFoundError(FileNotFoundError):
    pass


class VerifierOutputParseError(Exception):
    pass


NOT_GRADED = ("AgentAuthenticationError", "SSHAccessError", "CancelledError")
"""Some of those after which Harbor's error policy has no verifier run."""


class TrialEvent(Enum):
    START = "start"
    ENVIRONMENT_START = "environment-start"
    AGENT_START = "agent-start"
    AGENT_END = "agent-end"
    VERIFICATION_START = "verification-start"
    END = "end"
    CANCEL = "cancel"


class Trial:
    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self.folder = Path(config.trials_dir) / config.trial_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.task = Path(config.task.path)
        definition = tomllib.loads((self.task / "task.toml").read_text())
        assert definition["verifier"]["environment_mode"] == "separate", "the trial host starts no other"
        self.agent = AgentFactory.get_agent_class_from_config(config.agent)(config.agent)
        self.agent_environment = self._environment("env")
        self._hooks: dict[TrialEvent, list[Callable[[Any], Awaitable[None]]]] = {event: [] for event in TrialEvent}
        self.result = SimpleNamespace(exception_info=None, verifier_result=None)

    @classmethod
    async def create(cls, config: TrialConfig) -> Trial:
        return cls(config)

    def _environment(self, role: str) -> Any:
        given = self.config.environment
        return environment_class(given.import_path)(f"{self.config.trial_name}__{role}", self.folder, **given.kwargs)

    def add_hook(self, event: TrialEvent, hook: Callable[[Any], Awaitable[None]]) -> None:
        self._hooks[event].append(hook)

    async def _emit(self, event: TrialEvent) -> None:
        for hook in self._hooks[event]:
            await hook(SimpleNamespace(event=event, config=self.config, result=self.result))

    async def run(self) -> Any:
        await self._emit(TrialEvent.START)
        try:
            if self.config.source_trial is not None:
                shutil.copytree(Path(self.config.source_trial.path) / "artifacts", self.folder / "artifacts")
            else:
                await self._emit(TrialEvent.ENVIRONMENT_START)
                await self.agent_environment.start(self.task / "environment")
                await self.agent.setup(self.agent_environment)
                await self._run_agent()
                shutil.copytree(self.agent_environment.workspace, self.folder / "artifacts", symlinks=True)
                await self.agent_environment.stop(delete=True)
            if self.result.exception_info is None or self.result.exception_info.exception_type not in NOT_GRADED:
                await self._run_verifier()
        except asyncio.CancelledError as error:
            self._record(error)
            await self._emit(TrialEvent.CANCEL)
            raise
        except Exception as error:
            self._record(error)
        finally:
            await self.agent_environment.stop(delete=True)
            await self._emit(TrialEvent.END)
        return self.result

    async def _run_agent(self) -> None:
        try:
            await self._run_agent_phase()
        except Exception as error:
            self._record(error)

    async def _run_agent_phase(self) -> None:
        await self._emit(TrialEvent.AGENT_START)
        timeout_s = self.config.agent.override_timeout_sec
        try:
            instruction = (self.task / "instruction.md").read_text()
            await asyncio.wait_for(self.agent.run(instruction, self.agent_environment), timeout_s)
        except TimeoutError as error:
            raise AgentTimeoutError(f"Agent execution timed out after {timeout_s} seconds") from error
        finally:
            await self._emit(TrialEvent.AGENT_END)

    async def _run_verifier(self) -> None:
        await self._emit(TrialEvent.VERIFICATION_START)
        environment = self._environment("verifier__trial")
        try:
            await environment.start(self.folder / "artifacts")
            logs = self.folder / "verifier"
            shutil.rmtree(logs, ignore_errors=True)
            logs.mkdir()
            tests = environment.folder / "tests"
            shutil.copytree(self.task / "tests", tests)
            variables = {"VERIFIER_DIR": str(logs), "TESTS_DIR": str(tests)}
            timeout_s = self.config.verifier.override_timeout_sec
            try:
                await asyncio.wait_for(environment.exec(f"bash {tests}/test.sh", variables), timeout_s)
            except TimeoutError as error:
                raise VerifierTimeoutError(f"Verifier execution timed out after {timeout_s} seconds") from error
            self.result.verifier_result = SimpleNamespace(rewards=_rewards(logs))
        finally:
            await environment.stop(delete=True)

    def _record(self, error: BaseException) -> None:
        if self.result.exception_info is None:
            self.result.exception_info = SimpleNamespace(exception_type=type(error).__name__, exception_message=str(error))


def _rewards(logs: Path) -> dict[str, float]:
    if not (logs / "reward.txt").exists():
        raise RewardFileNotFoundError(f"No reward file found at {logs / 'reward.txt'}")
    try:
        return {"reward": float((logs / "reward.txt").read_text())}
    except ValueError as error:
        raise VerifierOutputParseError("Failed to parse rewards from text file") from error
