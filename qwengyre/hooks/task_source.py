"""Tasks by an iterator of the user's own: the next one for each rollout group, chosen by what came of those before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qwengyre.core.errors import ConfigError, HookFailed
from qwengyre.core.ids import GroupId
from qwengyre.hooks.load import Hook
from qwengyre.sandbox.task import Task


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A rollout group that has ended."""

    group: GroupId
    task: str
    version: int
    """Policy version at its dispatch."""
    rewards: tuple[float, ...]
    """Of the executions that count."""
    num_dropped: int

    @property
    def mean(self) -> float:
        """Mean reward; 0.0 when all were dropped."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


class TaskProgress:
    """What a task source is called with: it goes on to be true while the run goes on."""

    def __init__(self, seed: int, tasks: tuple[str, ...]) -> None:
        self.seed = seed
        """`runtime.seed`."""
        self.tasks = tasks
        """Names of the tasks of `tasks.train`, or of the family; empty without."""
        self._results: tuple[GroupResult, ...] = ()

    @property
    def results(self) -> tuple[GroupResult, ...]:
        """Of all groups that have ended so far, in the order of their ends."""
        return self._results

    def of(self, task: str) -> tuple[GroupResult, ...]:
        """Those of one task."""
        return tuple(result for result in self._results if result.task == task)

    def see(self, result: GroupResult) -> None:
        self._results = (*self._results, result)


class TaskSource(Protocol):
    """`tasks.source`."""

    def __call__(self, progress: TaskProgress, /) -> Iterator[str | Path]:
        """An iterator without an end: the name of a task in `progress.tasks`, or the path of a task folder, for each group to dispatch."""
        ...


class SourcedTasks:
    """The iterator, and what it yields as tasks that can be run. One call at a time."""

    def __init__(
        self, hook: Hook, progress: TaskProgress, known: Mapping[str, Task], load: Callable[[Path], Task], num_taken: int
    ):
        """`load` reads a task folder; it raises ConfigError. `num_taken` were taken in earlier lives: they are drawn again and dropped."""
        self._hook, self.progress, self._known, self._load = hook, progress, known, load
        self._num_taken, self._to_drop = num_taken, num_taken
        self._iterator: Iterator[str | Path] | None = None
        self._lock = threading.Lock()

    @property
    def key(self) -> str:
        return self._hook.ref.key

    def next(self) -> Task:
        """Raises HookFailed for what the iterator raises, for its end, and for what is no task."""
        with self._lock:
            while self._to_drop:
                self._draw()
                self._to_drop -= 1
            drawn = self._draw()
            self._num_taken += 1
            return self._task(drawn)

    def _draw(self) -> object:
        if self._iterator is None:
            made = self._hook(self.progress)
            try:
                self._iterator = iter(made)
            except TypeError:
                raise self._hook.refused(f"returned {type(made).__name__}: it must return an iterator of tasks") from None
        try:
            return next(self._iterator)
        except StopIteration:
            raise self._hook.refused(f"ended after {self._num_taken} tasks, and the run needs another: let it go on") from None
        except Exception as error:  # of the user's own
            raise self._hook.failed(error) from error

    def _task(self, drawn: object) -> Task:
        if isinstance(drawn, str) and drawn in self._known:
            return self._known[drawn]
        if not isinstance(drawn, (str, Path)):
            raise self._hook.refused(
                f"yielded {drawn!r} ({type(drawn).__name__}): it must yield names of tasks, or paths of their folders"
            )
        folder = Path(self._hook.ref.folder, drawn)
        if not folder.is_dir():
            raise self._hook.refused(f"yielded {str(drawn)!r}, which is neither a task of tasks.train nor a folder")
        try:
            return self._load(folder)
        except ConfigError as error:
            raise HookFailed(self.key, f"{self._hook.ref.path} yielded a task that cannot be used: {error}") from error
