"""What an answer has said so far, and who reads it. Every reader gets the whole answer, whenever it came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qwengyre.gateway.protocol.deltas import AnswerSoFar, Delta, ToolArguments, ToolStart
from qwengyre.gateway.protocol.request import CallLimit
from qwengyre.gateway.protocol.wanted import Wanted
from qwengyre.trajectory.match import ToolUse


class Reader:
    """One client's place in a log. `event` is set whenever there is something to look at."""

    def __init__(self, log: AnswerLog):
        self._log = log
        self.position = 0
        self.event = asyncio.Event()
        self.event.set()
        self.is_gone = False
        """The client hung up."""
        self.heard_at = 0.0
        """When the client last got anything."""

    def take(self) -> list[Delta]:
        """What is new since the last time."""
        new = self._log.deltas[self.position :]
        self.position += len(new)
        return new

    @property
    def has_news(self) -> bool:
        return self._log.is_whole or self.position < len(self._log.deltas)

    @property
    def is_at_end(self) -> bool:
        return self._log.is_whole and self.position == len(self._log.deltas)

    def hang_up(self, *_: object) -> None:
        self.is_gone = True
        self.event.set()


class AnswerLog:
    def __init__(self, stops: Sequence[str], calls: CallLimit = CallLimit.ANY):
        self.deltas: list[Delta] = []
        self.is_whole = False
        """Nothing more will be added."""
        self.is_complete = False
        """Everything that was sampled has been shown, but for what is not wanted."""
        self.readers: set[Reader] = set()
        self.wanted = Wanted(stops, calls)
        self._tools: list[tuple[ToolStart, list[str]]] = []

    @property
    def num_tools(self) -> int:
        return len(self._tools)

    def tool_uses(self, first: int = 0) -> list[ToolUse]:
        """The tool calls so far, from the `first` on; the last may not be whole yet."""
        return [ToolUse(id=start.id, name=start.name, arguments="".join(parts)) for start, parts in self._tools[first:]]

    def add(self, deltas: Sequence[Delta]) -> None:
        wanted = self.wanted.take(deltas)
        self.deltas += wanted
        for delta in wanted:
            if isinstance(delta, ToolStart):
                self._tools.append((delta, []))
            elif isinstance(delta, ToolArguments):
                self._tools[delta.index][1].append(delta.text)
        self._wake()

    def close(self, deltas: Sequence[Delta]) -> None:
        """Add the last of it."""
        self.add(deltas)
        self.deltas += self.wanted.finish()
        self.is_complete = not self.wanted.is_over
        self.end()

    def end(self) -> None:
        """Nothing more will be added, whole or not."""
        self.is_whole = True
        self._wake()

    def attach(self) -> Reader:
        reader = Reader(self)
        self.readers.add(reader)
        return reader

    def said(self, position: int) -> AnswerSoFar:
        """The message as a client at `position` knows it."""
        answer = AnswerSoFar()
        for delta in self.deltas[:position]:
            answer.add(delta)
        return answer

    def cuts(self, position: int) -> list[int]:
        """Where a client that read up to `position` may have broken off to go on: after every whole tool call, and there."""
        cuts = []
        for at in range(1, position):
            last, following = self.deltas[at - 1], self.deltas[at]
            if isinstance(last, ToolStart | ToolArguments) and not (
                isinstance(following, ToolArguments) and following.index == last.index
            ):
                cuts.append(at)
        return [*cuts, position]

    def _wake(self) -> None:
        for reader in self.readers:
            reader.event.set()
