"""What an answer has said so far, and who reads it. Every reader gets the whole answer, whenever it came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qwengyre.gateway.protocol.deltas import AnswerSoFar, Delta, ToolStart
from qwengyre.gateway.protocol.request import Calls
from qwengyre.gateway.protocol.wanted import Wanted


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
    def __init__(self, stops: Sequence[str], calls: Calls = Calls.ANY):
        self.deltas: list[Delta] = []
        self.is_whole = False
        """Nothing more will be added."""
        self.readers: set[Reader] = set()
        self.wanted = Wanted(stops, calls)
        self._marks: list[tuple[int, int]] = []

    @property
    def has_tools(self) -> bool:
        return any(isinstance(delta, ToolStart) for delta in self.deltas)

    def add(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Add what `num_tokens` tokens of the answer say, beyond what was added before."""
        self.deltas += self.wanted.take(deltas)
        self._marks.append((len(self.deltas), num_tokens))
        self._wake()

    def close(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Add the last of it."""
        self.add(deltas, num_tokens)
        self.deltas += self.wanted.finish()
        self._marks.append((len(self.deltas), num_tokens))
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

    def num_tokens(self, position: int) -> int:
        """How many tokens of the answer lie behind `position`."""
        return max((tokens for length, tokens in self._marks if length <= position), default=0)

    def _wake(self) -> None:
        for reader in self.readers:
            reader.event.set()
