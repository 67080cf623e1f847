"""Run one execution: workspace, harness, score. Every way in which it can end is an `Outcome`, never an exception.

prepare workspace --> harness (cold or warm) --> everything in its sandbox is killed --> evaluator on a copy --> Outcome
    | fails              | timeout: scored           |                                    | broken beyond its tries
    v                    | never called: dropped     | overall timeout: dropped           v
placeholder              v                           v                                 dropped
    | what it runs on died: lost, to be dispatched again
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from qwengyre.core.errors import HarnessLost, SandboxError, WorkspaceRefused
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.rpc.logs import log_tail
from qwengyre.sandbox.cold import start_cold
from qwengyre.sandbox.config import HarnessConfig, LimitsConfig
from qwengyre.sandbox.disk_threads import DiskThreads
from qwengyre.sandbox.disk_watch import DiskWatch
from qwengyre.sandbox.evaluator import Evaluator, Verdict
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress, HarnessFiles, HarnessProcess
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.kept import Keeper, raise_if_disk_full
from qwengyre.sandbox.room import Room
from qwengyre.sandbox.spaces import Space
from qwengyre.sandbox.tree import remove_tree
from qwengyre.sandbox.warm import WarmStarter
from qwengyre.sandbox.workspace import prepare_workspace

log = logging.getLogger(__name__)


class _HarnessEnd(msgspec.Struct, frozen=True):
    end: End
    exit_code: int | None
    detail: str


Rewarded = Callable[[Path, Outcome], Awaitable[Outcome]]
"""Makes another score of a scored workspace: the path of the workspace and its outcome in, the outcome with that score out."""


class Launcher:
    """Runs executions, any number at once, with one configuration. Use as an async context manager. `gateways` are those of the run:
    `ExecutionSpec.gateway` says which one an execution calls.

    `work` is a folder for workspaces of live executions (one folder each, removed at the end); workspaces of failed executions are moved
    to `failed`, the first `keep_failed` of them, and a few others to `sample`, if given (`keep`). Raises SandboxError when isolation cannot be given or the disk is full.
    """

    def __init__(
        self, config: HarnessConfig, gateways: Sequence[GatewayAddress], *, work: Path, failed: Path, sample: Path | None = None
    ):
        self.config = config
        self.gateways = gateways
        self.work = work.absolute()
        if config.isolation == "bwrap":
            for gateway in gateways:
                gateway.check()
                gateway.open_to_sandboxes()
        self.host = SandboxHost(config, work)
        self._warm = WarmStarter(self.host) if config.warm_start else None
        self._threads = DiskThreads()
        self._watch = DiskWatch(config.limits)
        self._evaluator = Evaluator(self.host, self._threads, self._watch)
        self._keeper = Keeper(config, failed, sample)
        self._live: dict[str, HarnessFiles] = {}

    async def __aenter__(self) -> Launcher:
        if self._warm is not None:
            await self._warm.open()
        self._watch.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._watch.stop()
        self._threads.close()
        if self._warm is not None:
            await self._warm.close()
        self.host.close()

    async def run_execution(
        self, spec: ExecutionSpec, num_calls: Callable[[], Awaitable[int]], rewarded: Rewarded | None = None
    ) -> Outcome:
        """Run `spec` to its end. `num_calls` closes the execution at the gateway and says how many model calls it made.

        It is awaited once, when the harness's sandbox is empty and before the evaluator; not at all when there was no harness.
        `rewarded` is awaited once, for a workspace that the evaluator has scored, outside of `overall_timeout_s`: it has its own.
        Cancelling kills everything that belongs to it. Raises SandboxError only when the disk is full, and what `rewarded` raises.
        """
        started = time.monotonic()
        folder = self.work / f"{spec.execution}.{spec.attempt}"
        files = self._live[spec.execution] = HarnessFiles(folder, self.host.spaces.at(folder))
        try:
            try:
                async with asyncio.timeout(self.config.overall_timeout_s):
                    outcome = await self._run(spec, files, num_calls)
            except TimeoutError:
                outcome = self._overtaken(spec, folder)
            finally:
                self._evaluator.forget(folder)
            if rewarded is not None and outcome.validity is Validity.VALID and outcome.scored_state:
                outcome = await rewarded(files.workspace, outcome)
            await self._threads.run(self._keeper.put_away, files, outcome, spec.task)
        finally:
            del self._live[spec.execution]
            await self._threads.run(_remove, files)
        return msgspec.structs.replace(outcome, duration_s=time.monotonic() - started)

    def workspace_of(self, execution: str) -> Path:
        """The workspace of a live execution."""
        return self._live[execution].workspace

    async def _run(self, spec: ExecutionSpec, files: HarnessFiles, num_calls: Callable[[], Awaitable[int]]) -> Outcome:
        try:
            await self._threads.run(self._prepare, spec, files)
            ended = await self._run_harness(spec, files)
        except HarnessLost as error:
            return _unscored(End.LOST, Validity.DROPPED, str(error))
        except (OSError, SandboxError) as error:
            raise_if_disk_full(error, self.work)
            return _unscored(End.SETUP_FAILED, Validity.PLACEHOLDER, str(error))
        if await num_calls() == 0 and ended.end is not End.HARNESS_TIMEOUT:
            return _never_called(ended)
        try:
            verdict = await self._evaluator.evaluate(spec.task, files.workspace, files.folder)
        except WorkspaceRefused as error:
            verdict = Verdict(spec.task.reward_range[0], "", 0, note=f"scored {spec.task.reward_range[0]:g}: {error}")
        except (OSError, SandboxError) as error:
            raise_if_disk_full(error, self.work)
            return _unscored(ended.end, Validity.PLACEHOLDER, str(error), ended.exit_code)
        return _scored(ended, verdict)

    def _prepare(self, spec: ExecutionSpec, files: HarnessFiles) -> None:
        if spec.task.wanted_image is not None and spec.task.image is None:
            raise SandboxError(f"{spec.task.name} runs on an image, which nobody has got for it (run_on_images)")
        remove_tree(files.folder)
        files.create(spec.task.instruction)
        prepare_workspace(spec.task, files.workspace, self.config.limits)

    def _overtaken(self, spec: ExecutionSpec, folder: Path) -> Outcome:
        """Dropped, unless its workspace has kept a scorer that works from giving a score: that must not be a way out."""
        detail = f"harness and evaluation took more than {self.config.overall_timeout_s:g} s (harness.overall_timeout_s)"
        if failure := self._evaluator.overtaken(spec.task, folder):
            low = spec.task.reward_range[0]
            return Outcome(End.OVERALL_TIMEOUT, Validity.VALID, low, "", 0.0, detail=f"{detail}, and {failure}: scored {low:g}")
        return _unscored(End.OVERALL_TIMEOUT, Validity.DROPPED, detail)

    async def _run_harness(self, spec: ExecutionSpec, files: HarnessFiles) -> _HarnessEnd:
        """Start the harness, wait for its end or its timeout, kill what is left of it. Its sandbox is empty on return."""
        timeout_s = self.config.timeout_s or spec.task.agent_timeout_s
        with self.host.room(files.folder.name, files.log, spec.task.image) as room:
            await self._threads.run(room.own, files.workspace, files.instruction)
            process = await self._start(spec, files, room)
            try:
                with self._watch.watching(files.space, process) as watched:
                    code = await process.wait(timeout_s)
            finally:
                await process.kill()
            memory_kills = room.cgroup.memory_kills()
        reason = watched.reason
        if code and not reason:  # it may have failed over a full workspace faster than anybody looked
            reason = await self._threads.run(_passed, files.space, self.config.limits)
        if memory_kills:
            reason = reason or f"killed at its memory limit of {self.config.limits.memory_mb} MB (limits.memory_mb)"
        tail = log_tail(files.log, secret=spec.key)
        if code is None:
            return _HarnessEnd(End.HARNESS_TIMEOUT, None, f"the harness was stopped after {timeout_s:g} s\n{tail}".strip())
        if code == 0 and not reason:
            return _HarnessEnd(End.EXITED, 0, "")
        return _HarnessEnd(End.CRASHED, code, f"{reason or f'exit code {code}'}\n{tail}".strip())

    async def _start(self, spec: ExecutionSpec, files: HarnessFiles, room: Room) -> HarnessProcess:
        gateway = self.gateways[spec.gateway]
        if self._warm is not None:
            return await self._warm.start(gateway, spec, files, room)
        return start_cold(self.host, gateway, spec, files, room)


def _passed(space: Space, limits: LimitsConfig) -> str:
    """Which limit a space passes, as a sentence; empty when none, or when that cannot be told."""
    try:
        return space.usage().over(limits)
    except OSError:
        return ""


def _remove(files: HarnessFiles) -> None:
    files.space.remove()
    remove_tree(files.folder)


def _unscored(end: End, validity: Validity, detail: str, exit_code: int | None = None) -> Outcome:
    return Outcome(end, validity, 0.0, "", 0.0, exit_code=exit_code, detail=detail, evaluator_tries=0)


def _never_called(ended: _HarnessEnd) -> Outcome:
    """Nothing was sampled, so nothing can be trained; a harness that fails before its first call says why in its output."""
    if ended.detail.partition("\n")[2].startswith(("bwrap: ", "overlay: ")):
        return _unscored(End.SETUP_FAILED, Validity.PLACEHOLDER, ended.detail, ended.exit_code)
    detail = f"the harness ended without a model call: does it use OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL?\n{ended.detail}".strip()
    return _unscored(End.NEVER_CALLED, Validity.DROPPED, detail, ended.exit_code)


def _scored(ended: _HarnessEnd, verdict: Verdict) -> Outcome:
    failed = bool(verdict.failure)
    return Outcome(
        end=End.EVALUATOR_FAILED if failed else ended.end,
        validity=Validity.DROPPED if failed else Validity.VALID,
        score=verdict.score,
        scored_state=verdict.scored_state,
        duration_s=0.0,
        exit_code=ended.exit_code,
        detail=verdict.failure or "\n".join(filter(None, (verdict.note, ended.detail))),
        evaluator_tries=verdict.tries,
    )
