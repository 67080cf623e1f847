"""Score a workspace: `tests/test.sh` in a fresh sandbox, on a copy, after every process of the harness is gone.

The tests are mounted only now; the log folder that takes the reward was in no sandbox before; there is no network.

A scorer that gives no score is run again. When it never does, it is run once more on the untouched workspace of the task, to tell who is
to blame: a scorer that is broken is a failure of the evaluator, never a score, but a workspace that breaks it has earned the lowest score.
Else a policy could drop its own bad executions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from qwengyre.core.errors import EvaluatorFailed, SandboxError
from qwengyre.images.image import Image
from qwengyre.rpc.logs import log_tail
from qwengyre.sandbox.disk_threads import DiskThreads
from qwengyre.sandbox.disk_watch import DiskWatch
from qwengyre.sandbox.host import SandboxHost
from qwengyre.sandbox.isolation import TESTS, VERIFIER_LOGS, WORKSPACE, Mount
from qwengyre.sandbox.limits import OVERSHOOT
from qwengyre.sandbox.links import LinkRule
from qwengyre.sandbox.on_image import OWN_PLACES, workspace_of
from qwengyre.sandbox.process import Process, Program
from qwengyre.sandbox.readable import SYSTEM
from qwengyre.sandbox.reward import read_reward
from qwengyre.sandbox.room import Room
from qwengyre.sandbox.spaces import Space
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.tree import is_open_to_others, remove_tree
from qwengyre.sandbox.workspace import copy_workspace, prepare_workspace


class Verdict(msgspec.Struct, frozen=True):
    """Score, validity and state of a scored workspace. `failure` is empty when the score is valid."""

    score: float
    scored_state: str
    tries: int
    failure: str = ""
    note: str = ""
    """Why a valid score is the lowest: the workspace let the scorer give none."""


class Evaluator:
    """Scores workspaces, and remembers which scorers have worked."""

    def __init__(self, host: SandboxHost, threads: DiskThreads, watch: DiskWatch):
        self._host, self._threads, self._watch = host, threads, watch
        self._have_scored: set[str] = set()
        """Folders of tasks whose scorer has scored what some harness left."""
        self._have_scored_untouched: set[str] = set()
        self._failing: dict[Path, str] = {}
        """Folder of an execution that is being scored -> how its scorer failed last."""

    async def evaluate(self, task: Task, workspace: Path, folder: Path) -> Verdict:
        """Run the evaluator until it gives a score, at most `evaluator_tries` times, each on its own copy of `workspace`.

        `folder` is the execution's; copies are removed, `verifier.log` stays. Raises WorkspaceRefused when the workspace is too large to
        be scored, SandboxError and OSError when it cannot be copied.
        """
        state = ""
        tries = self._host.config.evaluator_tries
        for attempt in range(1, tries + 1):
            place = self._place(folder / f"evaluation-{attempt}")
            try:
                state = await self._threads.run(self._copy, task, workspace, place)
                score = await self._run_once(task, place, folder / "verifier.log")
                self._have_scored.add(task.folder)
                return Verdict(score, state, attempt)
            except EvaluatorFailed as error:
                self._failing[folder] = str(error)
            finally:
                await self._threads.run(_discard, place)
        failure = f"{self._failing[folder]}\n{log_tail(folder / 'verifier.log')}".strip()
        if await self._is_workspace_to_blame(task, folder):
            return Verdict(
                task.reward_range[0], state, tries, note=f"scored {task.reward_range[0]:g}: in this workspace {failure}"
            )
        return Verdict(0.0, state, tries, failure)

    def overtaken(self, task: Task, folder: Path) -> str:
        """How a scorer that works has failed so far on an execution whose time is over; empty when that cannot be said of it."""
        works = task.folder in self._have_scored or task.folder in self._have_scored_untouched
        return self._failing.get(folder, "") if works else ""

    def forget(self, folder: Path) -> None:
        """The execution of this folder is over."""
        self._failing.pop(folder, None)

    async def _is_workspace_to_blame(self, task: Task, folder: Path) -> bool:
        """Run the scorer on the workspace that the harness began with. It works when it scores that, or fails on it in another way; or
        when it never scores that, but has scored what other harnesses left."""
        place = self._place(folder / "evaluation-untouched")
        try:
            await self._threads.run(self._prepare, task, place)
            await self._run_once(task, place, folder / "verifier-untouched.log")
        except EvaluatorFailed as error:
            never_does = task.folder not in self._have_scored_untouched
            return str(error) != self._failing[folder] or (never_does and task.folder in self._have_scored)
        except (OSError, SandboxError):
            return False
        finally:
            await self._threads.run(_discard, place)
        self._have_scored_untouched.add(task.folder)
        return True

    def _links(self, image: Image | None) -> LinkRule:
        """Links of a workspace that the evaluator is given: to what it has from the same place as the harness had it."""
        host = self._host
        if image is None:
            return LinkRule((WORKSPACE, "/app") if host.isolated else (), (*SYSTEM, *host.readable))
        own = {place.split("/")[1] for place in (*OWN_PLACES, "/tmp", "/run")}
        visible = (*(f"/{name}" for name in os.listdir(image.root) if name not in own), *host.config.readable)
        return LinkRule((workspace_of(image, WORKSPACE), WORKSPACE, "/app"), visible)

    def _place(self, folder: Path) -> _Place:
        return _Place(folder, self._host.spaces.at(folder, OVERSHOOT))

    def _copy(self, task: Task, workspace: Path, place: _Place) -> str:
        place.make()
        return copy_workspace(workspace, place.workspace, self._host.config.limits, self._links(task.image))

    def _prepare(self, task: Task, place: _Place) -> None:
        place.make()
        prepare_workspace(task, place.workspace, self._host.config.limits)

    async def _run_once(self, task: Task, place: _Place, log: Path) -> float:
        host = self._host
        timeout_s = host.config.verifier_timeout_s or task.verifier_timeout_s
        with host.room(f"{place.folder.parent.name}-{place.folder.name}", log, task.image) as room:
            await self._threads.run(room.own, place.workspace, place.logs)
            tests = await self._threads.run(_shown_tests, task, place, room)
            process = _start(host, task, tests, place, room)
            try:
                with self._watch.watching(place.space, process, OVERSHOOT) as watched:
                    code = await process.wait(timeout_s)
            finally:
                await process.kill()
        if watched.reason:
            raise EvaluatorFailed(f"tests/test.sh of {task.name} was ended: {watched.reason}")
        if code is None:
            raise EvaluatorFailed(f"tests/test.sh of {task.name} did not end within {timeout_s:g} s")
        try:
            return read_reward(place.logs, *task.reward_range)
        except EvaluatorFailed as error:
            raise EvaluatorFailed(f"tests/test.sh of {task.name} ended with exit code {code}, and {error}") from None


class _Place(msgspec.Struct, frozen=True):
    """Host paths of one run of a scorer."""

    folder: Path
    space: Space

    def make(self) -> None:
        """Raises OSError and SandboxError."""
        self.folder.mkdir(parents=True)
        self.space.make()
        self.logs.mkdir()

    @property
    def workspace(self) -> Path:
        """The copy that is scored, as this process reaches it."""
        return self.space.folder / "workspace"

    @property
    def logs(self) -> Path:
        """What takes the reward, as this process reaches it."""
        return self.space.folder / "verifier"


def _discard(place: _Place) -> None:
    with contextlib.suppress(OSError):
        place.space.remove()
        remove_tree(place.folder)


def _shown_tests(task: Task, place: _Place, room: Room) -> Path:
    """The tests of a task, or a copy for a sandbox of root that may not read them."""
    if room.identity is None or is_open_to_others(task.tests):
        return task.tests
    shutil.copytree(task.tests, place.folder / "tests", symlinks=True)
    room.own(place.folder / "tests")
    return place.folder / "tests"


def _start(host: SandboxHost, task: Task, tests: Path, place: _Place, room: Room) -> Process:
    environment = _environment(host, task, place)
    if not host.isolated:
        program = Program(["/bin/bash", str(task.tests / "test.sh")], environment, room.output)
        return host.start_supervised(program, room, None, cwd=str(place.workspace), stdin=os.devnull)
    mounts = (
        Mount(str(place.space.seen / "workspace"), workspace_of(task.image, WORKSPACE), writable=True),
        Mount(str(place.space.seen / "verifier"), VERIFIER_LOGS, writable=True),
        Mount(str(tests), TESTS),
    )
    return host.start_script(f"{TESTS}/test.sh", room, host.view(mounts, image=task.image), environment)


def _environment(host: SandboxHost, task: Task, place: _Place) -> dict[str, str]:
    own = {
        "TESTS_DIR": TESTS if host.isolated else str(task.tests),
        "VERIFIER_DIR": VERIFIER_LOGS if host.isolated else str(place.logs),
    }
    return host.environment(host.home(place.folder, task.image), task.image) | task.agent_env | task.verifier_env | own
