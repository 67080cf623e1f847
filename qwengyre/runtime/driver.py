"""The event loop of a run: stamp, journal, decide, start.

Everything that happened comes in as a scheduler event; everything that is done goes out as a command. The order of the
journal is the order of `Scheduler.handle`, so a replay sees what the scheduler saw.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from qwengyre.journal import Journal
from qwengyre.runtime.records import Decided
from qwengyre.scheduler.commands import AnyCommand, Command, FinishRun
from qwengyre.scheduler.events import Event
from qwengyre.scheduler.scheduler import Scheduler

Handler = Callable[[Any], Coroutine[Any, Any, None] | None]
"""Of one kind of command, of which `handlers` is the table."""
Decision = Callable[[Event, list[AnyCommand]], None]
"""Told of every event and what was decided about it."""


class RunClock:
    """Seconds since the run began; goes on where the last life of the controller stopped."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self._origin = time.monotonic() - offset_s

    def now(self) -> float:
        return time.monotonic() - self._origin


class Driver:
    """Feeds the scheduler and starts what it decides. `handlers` has one entry for every kind of command."""

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Journal,
        clock: RunClock,
        handlers: Mapping[type, Handler],
        on_decided: Decision = lambda event, commands: None,
    ) -> None:
        self.scheduler, self.journal, self.clock = scheduler, journal, clock
        self._handlers, self._on_decided = handlers, on_decided
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, kind: type[Event], **fields: object) -> None:
        """Something happened now."""
        self._events.put_nowait(kind(at=self.clock.now(), **fields))

    async def run(self, pending: Sequence[AnyCommand] = ()) -> None:
        """Until the scheduler says FinishRun. The first error of any command ends the run and is raised.

        `pending` are commands of an earlier life that had no answer.
        """
        async with asyncio.TaskGroup() as tasks:
            for command in pending:
                self.start(command, tasks)
            finished = any(isinstance(command, FinishRun) for command in pending)
            while not finished:
                event = await self._events.get()
                for command in self.decide(event):
                    finished = finished or isinstance(command, FinishRun)
                    self.start(command, tasks)

    def decide(self, event: Event) -> list[AnyCommand]:
        self.journal.append(event)
        commands = self.scheduler.handle(event)
        if commands:
            self.journal.append(Decided(tuple(commands)))
        self._on_decided(event, commands)
        return commands

    def start(self, command: Command, tasks: asyncio.TaskGroup) -> None:
        job = self._handlers[type(command)](command)
        if job is not None:
            tasks.create_task(job, name=type(command).__name__)
