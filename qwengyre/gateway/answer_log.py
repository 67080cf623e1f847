"""What an answer has said so far, and who reads it. Every reader gets the whole answer, whenever it came."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qwengyre.gateway.protocol.deltas import AnswerSoFar, Delta, TextDelta, ToolStart
from qwengyre.gateway.protocol.text import StopStrings


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
    def __init__(self, stops: Sequence[str]):
        self.deltas: list[Delta] = []
        self.is_whole = False
        """Nothing more will be added."""
        self.readers: set[Reader] = set()
        self._stops = StopStrings(stops) if stops else None
        self._marks: list[tuple[int, int]] = []

    @property
    def has_stops(self) -> bool:
        return self._stops is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found if self._stops else None

    @property
    def withholds(self) -> bool:
        """Whether there is text that no client was shown because it began, or followed, a stop string."""
        return self._stops is not None and (self._stops.found is not None or self._stops.holds)

    @property
    def has_tools(self) -> bool:
        return any(isinstance(delta, ToolStart) for delta in self.deltas)

    def add(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Add what `num_tokens` tokens of the answer say, beyond what was added before."""
        if self._stops is None:
            self.deltas += deltas
        else:
            self._add_until_stop(deltas, self._stops)
        self._marks.append((len(self.deltas), num_tokens))
        self._wake()

    def close(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Add the last of it."""
        self.add(deltas, num_tokens)
        if self._stops is not None and (held := self._stops.flush()):
            self.deltas.append(TextDelta(text=held))
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

    def _add_until_stop(self, deltas: Sequence[Delta], stops: StopStrings) -> None:
        for delta in deltas:
            if stops.found is not None:
                return
            is_text = isinstance(delta, TextDelta)
            if text := stops.push(delta.text) if is_text else stops.flush():
                self.deltas.append(TextDelta(text=text))
            if not is_text:  # the text before it has ended: what was held back did not become a stop string
                self.deltas.append(delta)

    def _wake(self) -> None:
        for reader in self.readers:
            reader.event.set()
