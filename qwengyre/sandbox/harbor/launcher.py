"""Run executions as trials of Harbor. Every way in which one can end is an `Outcome`, as with `sandbox/launcher.py`.

start: build, boot, install --> a slot --> agent --> no more calls --> verifier in its own environment --> Outcome
    | fails                               | timeout: scored       | none were made: dropped   | no reward: regraded
    v                                     | environment fails     |                           v beyond its tries
placeholder <------------------------------                                                   dropped, or the agent's fault
    | the trial host, or the trial's process, died: lost, to be dispatched again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError, EvaluatorFailed, HarnessLost, SandboxError
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.disk_threads import DiskThreads
from qwengyre.sandbox.harbor.config import HarborConfig
from qwengyre.sandbox.harbor.ends import AgentEnd, TrialResult, agent_end, never_called, not_scored, score_of
from qwengyre.sandbox.harbor.trial_process import LiveTrial, TrialHost
from qwengyre.sandbox.harbor.trials import Trials, model_variables
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress, HarnessFiles
from qwengyre.sandbox.kept import Keeper, raise_if_disk_full
from qwengyre.sandbox.launcher import Rewarded
from qwengyre.sandbox.spaces import FolderSpace
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.tree import remove_tree

log = logging.getLogger(__name__)
MAX_LOSSES: Final = 5
"""Lives of a trial host in a row of which no trial came to a result: what is broken fails at every start."""
NO_SEPARATE_VERIFIER: Final = (
    "its verifier would run in the environment of the agent, which can write its own reward there: set environment_mode = "
    '"separate" in [verifier] of task.toml, and name what it grades in artifacts'
)


class HarborLauncher:
    """Has the interface of `Launcher`. At most `max_agents` agents run at once.

    `work` is a folder for the trials of live executions; those of failed ones are moved to `failed`, a few others to `sample`.
    """

    def __init__(
        self,
        config: HarborConfig,
        harness: HarnessConfig,
        gateways: Sequence[GatewayAddress],
        folders: TrialFolders,
        *,
        max_agents: int,
    ):
        self.config, self.harness, self.gateways, self.folders = config, harness, gateways, folders
        self.work = folders.work.absolute()
        self._keeper = Keeper(harness, folders.failed, folders.sample)
        self.threads = DiskThreads()
        self._room = asyncio.Semaphore(config.max_trials)
        self.agents = asyncio.Semaphore(max_agents)
        self._host: TrialHost | None = None
        self._opening = asyncio.Lock()
        self.num_losses = 0
        self.have_scored: set[str] = set()
        """Folders of tasks whose verifier has given a reward."""
        self.run_name = secrets.token_hex(3)
        """In the name of every trial: container engines know trials of all runs of a machine by their name."""

    async def __aenter__(self) -> HarborLauncher:
        """Raises ConfigError and SandboxError when there is no Harbor that can run this."""
        self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self.live_host()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._host is not None:
            await self._host.close()
        self.threads.close()

    async def run_execution(
        self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]], rewarded: Rewarded | None = None
    ) -> Outcome:
        """Run `spec` to its end. `num_calls` is awaited once, at the end of the agent and before its verifier; not at all without an agent.

        Cancelling takes its environment down. Raises SandboxError when the disk is full, and when no trial host stays alive.
        """
        assert rewarded is None, "a run with hooks.reward runs no trials of Harbor (RunConfig)"
        async with self._room:
            started = time.monotonic()
            one = _Execution(self, spec, num_calls)
            try:
                outcome = await one.run()
                await self.threads.run(self._keeper.put_away, one.files, outcome, spec.task)
            finally:
                await self.threads.run(remove_tree, one.files.folder)
        return msgspec.structs.replace(outcome, duration_s=time.monotonic() - started)

    async def live_host(self) -> TrialHost:
        """Started again if it has died. Raises SandboxError when it dies again and again."""
        async with self._opening:
            if self._host is not None and self._host.is_lost:
                await self._host.close()
                self._host = None
                self.num_losses += 1
                if self.num_losses >= MAX_LOSSES:
                    raise SandboxError(f"Harbor's trial host died {MAX_LOSSES} times in a row: see {self.folders.log}")
                log.error("trial_host_lost", extra={"losses": self.num_losses})
            if self._host is None:
                host = TrialHost(self.config, self.folders.log)
                try:
                    await host.open()
                except ConfigError as error:
                    raise SandboxError(str(error)) from error
                self._host = host
            return self._host


class TrialFolders(msgspec.Struct, frozen=True):
    """Where a launcher's trials are, are kept, and what their host prints."""

    work: Path
    failed: Path
    sample: Path | None
    log: Path


class _Execution:
    """One execution, through all its trials."""

    def __init__(self, launcher: HarborLauncher, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]]):
        self._launcher, self._spec, self._num_calls = launcher, spec, num_calls
        self._name = f"{launcher.run_name}-{spec.execution}-{spec.attempt}"
        folder = launcher.work / f"{spec.execution}.{spec.attempt}"
        self.files = HarnessFiles(folder, FolderSpace(folder, launcher.harness.limits))
        self._trials = Trials(launcher.config, launcher.harness, folder)

    async def run(self) -> Outcome:
        overall_s = self._launcher.harness.overall_timeout_s
        start_s = self._launcher.config.start_timeout_s
        has_begun = False
        try:
            async with asyncio.timeout(start_s) as limit:

                def begin() -> None:
                    nonlocal has_begun
                    has_begun = True
                    limit.reschedule(asyncio.get_running_loop().time() + overall_s)

                return await self._attempt(begin, lambda: limit.reschedule(None))
        except TimeoutError:
            if has_begun:
                detail = f"agent and verifier took more than {overall_s:g} s (harness.overall_timeout_s)"
                return not_scored(End.OVERALL_TIMEOUT, Validity.DROPPED, detail)
            detail = f"the agent had not started after {start_s:g} s (sandbox.harbor.start_timeout_s)"
            return not_scored(End.SETUP_FAILED, Validity.PLACEHOLDER, detail)
        except HarnessLost as error:
            return not_scored(End.LOST, Validity.DROPPED, str(error))
        except OSError as error:
            raise_if_disk_full(error, self._launcher.work)
            return not_scored(End.SETUP_FAILED, Validity.PLACEHOLDER, str(error))

    async def _attempt(self, begin: Callable[[], None], wait: Callable[[], None]) -> Outcome:
        spec = self._spec
        if not spec.task.has_separate_verifier:
            return not_scored(End.SETUP_FAILED, Validity.PLACEHOLDER, f"{spec.task.name}: {NO_SEPARATE_VERIFIER}")
        await self._launcher.threads.run(self._prepare)
        variables = model_variables(self._launcher.gateways[spec.gateway], spec)
        config = self._trials.run(self._name, spec, variables)
        async with self._trial(config, variables) as trial:
            said = await trial.hear()
            if said["event"] == "result":
                return not_scored(End.SETUP_FAILED, Validity.PLACEHOLDER, _result(said).said)
            wait()
            async with self._launcher.agents:
                begin()
                trial.go()
                said = await trial.hear()
            ended = agent_end(said["error"], said["message"], self._trials.agent_timeout_s(spec))
            if await self._num_calls() == 0 and ended.end not in (End.HARNESS_TIMEOUT, End.SETUP_FAILED):
                return never_called(ended)
            trial.go()
            result = _result(await trial.hear())
        if ended.is_lost_with_its_environment:
            return not_scored(ended.end, Validity.PLACEHOLDER, ended.detail)
        return await self._score(ended, result)

    def _prepare(self) -> None:
        remove_tree(self.files.folder)
        self.files.folder.mkdir(mode=0o700, parents=True)

    @contextlib.asynccontextmanager
    async def _trial(self, config: dict[str, Any], variables: dict[str, str]) -> AsyncIterator[LiveTrial]:
        host = await self._launcher.live_host()
        async with host.trial(config, variables, self.files.folder / f"{config['trial_name']}.log") as trial:
            yield trial
        self._launcher.num_losses = 0

    async def _score(self, ended: AgentEnd, result: TrialResult) -> Outcome:
        """The reward that the verifier gave, at once or when it was run again on what the agent left."""
        task, tries = self._spec.task, self._launcher.harness.evaluator_tries
        low, high = task.reward_range
        failure = ""
        for attempt in range(1, tries + 1):
            if attempt > 1 or not result.is_verified:
                again = f"{self._name}-r{attempt}"
                result = await self._grade(self._trials.regrade(again, self._spec, self._name))
            try:
                score = _score(result, low, high)
            except EvaluatorFailed as error:
                failure = str(error)
                continue
            self._launcher.have_scored.add(task.folder)
            return Outcome(ended.end, Validity.VALID, score, "", 0.0, detail=ended.detail, evaluator_tries=attempt)
        if result.gave_none and await self._is_agent_to_blame(task):
            detail = f"scored {low:g}: of what this agent left, {failure}\n{ended.detail}".strip()
            return Outcome(ended.end, Validity.VALID, low, "", 0.0, detail=detail, evaluator_tries=tries)
        return not_scored(End.EVALUATOR_FAILED, Validity.DROPPED, failure, tries=tries)

    async def _is_agent_to_blame(self, task: Task) -> bool:
        """Whether the verifier scores what others leave: else an agent could drop its own bad executions."""
        if task.folder in self._launcher.have_scored:
            return True
        result = await self._grade(self._trials.untouched(f"{self._name}-u", self._spec))
        try:
            _score(result, *task.reward_range)
        except EvaluatorFailed:
            return False
        self._launcher.have_scored.add(task.folder)
        return True

    async def _grade(self, config: dict[str, Any]) -> TrialResult:
        """A trial in which no model is called."""
        async with self._trial(config, {}) as trial:
            while (said := await trial.hear())["event"] != "result":
                trial.go()
        return _result(said)


def _result(said: dict[str, Any]) -> TrialResult:
    return msgspec.convert({name: said[name] for name in TrialResult.__struct_fields__}, TrialResult)


def _score(result: TrialResult, low: float, high: float) -> float:
    """Raises EvaluatorFailed."""
    if not result.rewards:
        raise EvaluatorFailed(f"the verifier gave no reward: {result.said or 'Harbor does not say why'}")
    return score_of(result.rewards, low, high)
