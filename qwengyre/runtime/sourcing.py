"""Which task a training group runs when a source of the user's own says so: asked once for each group, in the order of dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import GroupId
from qwengyre.core.records import Validity
from qwengyre.hooks.loaded import LoadedHooks
from qwengyre.hooks.task_source import GroupResult, SourcedTasks, TaskProgress
from qwengyre.hooks.threads import HookThreads
from qwengyre.journal import Journal
from qwengyre.runtime.records import ExecutionDone, TaskChosen
from qwengyre.sandbox.harbor.check import mistakes_with_harbor
from qwengyre.sandbox.preflight import check_on_images
from qwengyre.sandbox.task import Task, load_task
from qwengyre.sandbox.task_images import run_on_images

if TYPE_CHECKING:
    from qwengyre.runtime.run_config import RunConfig


class Sourcing:
    """What was journalled is not asked again; a restart draws as many tasks as were dispatched, and drops them."""

    def __init__(
        self,
        config: RunConfig,
        loaded: LoadedHooks,
        tasks: dict[str, Task],
        held_out: Sequence[str],
        journal: Journal,
        chosen: Mapping[GroupId, TaskChosen],
    ) -> None:
        """`tasks` are all that the run knows; those of other folders are added to it."""
        assert loaded.source is not None
        self._config, self._tasks, self._held_out, self._journal = config, tasks, frozenset(held_out), journal
        self._chosen = dict(chosen)
        known = {name: task for name, task in tasks.items() if name not in self._held_out}
        progress = TaskProgress(config.runtime.seed, tuple(known))
        self._source = SourcedTasks(loaded.source, progress, known, self._load, num_taken=len(chosen))
        self._threads = HookThreads(1, config.hooks.timeout_s)
        self._asking = asyncio.Lock()

    async def task_of(self, group: GroupId) -> str:
        """The name of its task. Raises HookFailed, and ConfigError for a task of an earlier life whose folder is gone."""
        async with self._asking:
            chosen = self._chosen.get(group)
            if chosen is None:
                task = await self._threads.call(self._source.key, self._source.next)
                chosen = self._chosen[group] = TaskChosen(group, task.name, task.folder)
                self._journal.append(chosen)
            else:
                known = self._tasks.get(chosen.task)
                task = known if known is not None else await asyncio.to_thread(self._load, Path(chosen.folder))
            self._tasks[task.name] = task
            return chosen.task

    def see(self, group: GroupId, version: int, done: Sequence[ExecutionDone]) -> None:
        """A group has ended: the source may go by it."""
        rewards = tuple(one.outcome.score for one in done if one.outcome.validity is not Validity.DROPPED)
        self._source.progress.see(GroupResult(group, done[0].task, version, rewards, len(done) - len(rewards)))

    def _load(self, folder: Path) -> Task:
        task = load_task(folder.resolve())
        if task.name in self._held_out:
            raise ConfigError("this is the name of a held-out task, which is never trained on", file=str(folder))
        known = self._tasks.get(task.name)
        if known is not None and known.folder != task.folder:
            raise ConfigError(f"its name is taken by {known.folder}: a task is known by its folder's name", file=str(folder))
        if self._config.sandbox.kind == "harbor":
            for mistake in mistakes_with_harbor([task], self._config.sandbox.harbor):
                raise mistake
            return task
        [task] = run_on_images([task], self._config.sandbox, self._config.harness, lambda line: None)
        check_on_images([task.image] if task.image else [], self._config.harness)
        return task
