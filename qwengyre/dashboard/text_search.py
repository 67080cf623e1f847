"""Search in what executions said: through the journals of gateways, each in the order of writing, a part at each look."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.arrays import TOKEN
from qwengyre.core.ids import ExecutionId
from qwengyre.dashboard.journal_follower import share_of
from qwengyre.dashboard.said import Decode
from qwengyre.journal import read
from qwengyre.trajectory.records import CallFinished, CallStarted, GatewayRecord, Opened, TokensSampled

MAX_HITS: Final = 200
"""A search ends here: who finds more wants another word."""
SNIPPET_CHARS: Final = 120
"""On each side of what was found."""
RECORDS_PER_LOOK: Final = 100


class SearchHit(msgspec.Struct, frozen=True):
    execution: ExecutionId
    attempt: int
    call: int
    is_answer: bool
    """Found in what the policy sampled; else in what its context brought."""
    before: str
    found: str
    after: str

    @property
    def call_name(self) -> str:
        """As `tree_rows.short` calls it."""
        return f"a{self.attempt}c{self.call}" if self.attempt else f"c{self.call}"


class TextSearch:
    """One search. Not safe to share between threads: whoever serves requests side by side holds a lock around it."""

    def __init__(self, journals: Sequence[Path], decode: Decode, text: str):
        self.text = text
        self.hits: list[SearchHit] = []
        self._positions = dict.fromkeys(journals, 0)
        """How far each was searched."""
        self._decode = decode
        self._sessions: dict[int, tuple[ExecutionId, int]] = {}
        self._sampled: dict[tuple[int, int], bytearray] = {}
        """Answers that have not ended where the search stands."""

    @property
    def share_read(self) -> float:
        if len(self.hits) >= MAX_HITS:
            return 1.0
        return share_of(self._positions, self._positions)

    def go_on(self, budget_s: float) -> None:
        """Search for at most about `budget_s`. Raises JournalError."""
        if self.share_read == 1.0:
            return
        until = time.monotonic() + budget_s
        for number, (journal, position, record) in enumerate(self._unread()):
            self._take(record)
            self._positions[journal] = position
            if len(self.hits) >= MAX_HITS or (number % RECORDS_PER_LOOK == RECORDS_PER_LOOK - 1 and time.monotonic() > until):
                return

    def _unread(self) -> Iterator[tuple[Path, int, GatewayRecord]]:
        for journal, start in list(self._positions.items()):
            if journal.is_file():
                for position, record in read(journal, GatewayRecord, start=start):
                    yield journal, position, record

    def _take(self, record: GatewayRecord) -> None:
        match record:
            case Opened():
                self._sessions[record.session] = record.execution, record.attempt
            case CallStarted():
                self._look(record.session, record.call, record.context_ids, is_answer=False)
            case TokensSampled():
                self._sampled.setdefault((record.session, record.call), bytearray()).extend(record.token_ids)
            case CallFinished():
                ids = self._sampled.pop((record.session, record.call), bytearray())
                self._look(record.session, record.call, bytes(ids), is_answer=True)

    def _look(self, session: int, call: int, ids: bytes, *, is_answer: bool) -> None:
        if not ids or session not in self._sessions:
            return
        text = self._decode(np.frombuffer(ids, TOKEN).tolist())
        at = text.lower().find(self.text.lower())
        if at < 0 or len(self.hits) >= MAX_HITS:
            return
        stop, (execution, attempt) = at + len(self.text), self._sessions[session]
        before, after = text[max(0, at - SNIPPET_CHARS) : at], text[stop : stop + SNIPPET_CHARS]
        self.hits.append(SearchHit(execution, attempt, call, is_answer, before, text[at:stop], after))


class Searches:
    """The searches of one run that were asked for last: a page that looks again goes on where the look before stopped."""

    KEPT: Final = 8

    def __init__(self) -> None:
        self._known: OrderedDict[str, TextSearch] = OrderedDict()

    @property
    def shares_read(self) -> list[float]:
        return [search.share_read for search in self._known.values()]

    def find(self, journals: Sequence[Path], decode: Decode, text: str) -> TextSearch:
        search = self._known.get(text)
        if search is None:
            search = self._known[text] = TextSearch(journals, decode, text)
            if len(self._known) > self.KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        return search
