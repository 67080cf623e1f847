"""Callbacks on events of a run: told one after the other in a thread of their own, and never waited for."""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from qwengyre.core.errors import ConfigError, HookFailed
from qwengyre.core.ids import ExecutionId, GroupId
from qwengyre.core.near import nearest
from qwengyre.hooks.load import Hook, HookRef, load_hook
from qwengyre.telemetry.records import EvaluationFinished, RunEnded, StepFinished

MAX_WAITING: Final = 10_000
"""Events that wait for a slow callback: an hour of three executions a second, some megabytes."""
KEY: Final = "hooks.callbacks"


@dataclass(frozen=True, slots=True)
class ExecutionOver:
    """An execution has ended and is journalled."""

    at: float
    """Seconds on the run's clock."""
    execution: ExecutionId
    group: GroupId
    kind: str
    """`train` or `evaluation`."""
    task: str
    reward: float
    task_score: float
    validity: str
    """`valid`, `placeholder` or `dropped`."""
    end: str
    num_calls: int
    num_tokens_sampled: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """All engines that serve have a new version."""

    at: float
    version: int


class RunCallbacks(Protocol):
    """What a class of `hooks.callbacks` may have: any of these methods. It is made with the run folder, once for each life of the run."""

    def on_step(self, step: StepFinished, /) -> None: ...

    def on_publish(self, published: WeightsPublished, /) -> None: ...

    def on_evaluation(self, evaluation: EvaluationFinished, /) -> None: ...

    def on_execution(self, execution: ExecutionOver, /) -> None: ...

    def on_end(self, end: RunEnded, /) -> None: ...


EVENTS: Final = ("on_step", "on_publish", "on_evaluation", "on_execution", "on_end")
Event = StepFinished | WeightsPublished | EvaluationFinished | ExecutionOver | RunEnded


def load_callbacks(path: str, folder: str) -> Hook:
    """Raises ConfigError for what is no class, has none of the methods, has another that begins with `on_`, or takes no event."""
    hook = load_hook(HookRef(KEY, path, folder), "(folder)")

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{path} {why}", file=hook.file or None, line=hook.line, key=KEY)

    if not inspect.isclass(hook.target):
        raise refuse("is no class: its methods are called after events")
    present = [name for name in dir(hook.target) if name.startswith("on_")]
    if unknown := sorted(set(present) - set(EVENTS)):
        near = nearest(unknown[0], EVENTS)
        raise refuse(
            f"has {unknown[0]}, which nobody calls. {f'Did you mean {near}?' if near else 'There are: ' + ', '.join(EVENTS)}"
        )
    if not present:
        raise refuse(f"has no method to call: there are {', '.join(EVENTS)}")
    for name in present:
        method = getattr(hook.target, name)
        if inspect.iscoroutinefunction(method):
            raise refuse(f"has {name} as a coroutine: take `async` away")
        try:
            inspect.signature(method).bind("self", "event")
        except TypeError as error:
            raise refuse(f"has {name}, which cannot be called with one event: {error}") from error
    return hook


class Callbacks:
    """All of a run. `say` is called from its thread, with what went wrong: once for each method that fails."""

    def __init__(self, hooks: tuple[Hook, ...], folder: Path, say: Callable[[str], None]) -> None:
        """Makes the objects. Raises HookFailed for one that cannot be made."""
        self._told = [(hook, hook(folder)) for hook in hooks]
        self._say = say
        self._events: queue.Queue[tuple[str, Event] | None] = queue.Queue(MAX_WAITING)
        self._failed: set[tuple[str, str]] = set()
        self.num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=KEY, daemon=True)
        if self._told:
            self._thread.start()

    def tell(self, name: str, event: Event) -> None:
        """Returns at once. An event for which there is no room is dropped, which is counted and said."""
        if not self._told or self._is_closed:
            return
        try:
            self._events.put_nowait((name, event))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                self._say(
                    f"{KEY}: more than {MAX_WAITING:,} events wait for a callback: newer ones are dropped until there is room"
                )

    def close(self, timeout_s: float) -> None:
        """Wait until all that was told is done, at most `timeout_s`."""
        if not self._told or self._is_closed:
            return
        self._is_closed = True
        try:
            self._events.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._say(f"{KEY}: still at work {timeout_s:g} s after the end of the run (hooks.timeout_s): left behind")
        if self.num_dropped:
            self._say(f"{KEY}: {self.num_dropped:,} events were dropped")

    def _run(self) -> None:
        while (told := self._events.get()) is not None:
            name, event = told
            for hook, made in self._told:
                if (method := getattr(made, name, None)) is not None:
                    self._call(hook, name, method, event)

    def _call(self, hook: Hook, name: str, method: Callable[[Event], object], event: Event) -> None:
        try:
            method(event)
        except Exception as error:  # of the user's own: said, and the run goes on
            failed: HookFailed = hook.failed(error)
            if (hook.ref.path, name) not in self._failed:
                self._failed.add((hook.ref.path, name))
                self._say(f"{failed} (in {name}). The run goes on; it is not said again")
