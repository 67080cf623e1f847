"""Which executions a table shows, and in which order: what a query string asks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from qwengyre.core.ids import GroupId
from qwengyre.dashboard.executions import ExecutionEntry, GroupEntry

PAGE_SIZE: Final = 50
"""Rows of a page: two screens, and a few milliseconds to draw."""

SORTS: Final[dict[str, Callable[[ExecutionEntry], object]]] = {
    "id": lambda e: (e.group, e.index),
    "task": lambda e: (e.task, e.group, e.index),
    "group": lambda e: (e.group, e.index),
    "reward": lambda e: -math.inf if e.reward is None else e.reward,
    "end": lambda e: (e.end, e.group, e.index),
    "calls": lambda e: e.num_calls or 0,
    "tokens": lambda e: e.num_tokens or 0,
    "time": lambda e: e.seconds or 0.0,
    "version": lambda e: (e.version, e.group, e.index),
    "ended": lambda e: math.inf if e.ended_at is None else e.ended_at,
}
"""Column -> what it sorts by."""


class ExecutionQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What the form above the table holds. An empty text filters nothing."""

    kind: str = ""
    task: str = ""
    end: str = ""
    reward: str = ""
    """`zero`, `partial`, `one`, `spread` (of groups whose rewards differ), `none` (not scored)."""
    with_: str = ""
    """`sub-agents`, `compactions`, `moves`, `detail`."""
    step: str = ""
    version: str = ""
    group: str = ""
    text: str = ""
    """Found in the id, the task, the end or the reason of a failure."""
    sort: str = "ended"
    down: bool = True
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> ExecutionQuery:
        """From a query string. What it does not know is left at its default: an address that somebody typed is never an error."""
        page = given.get("page", "1")
        known = {name: given.get(name.rstrip("_"), "").strip()[:200] for name in FILTERS}
        sort = given.get("sort", "")
        return cls(
            **known,
            sort=sort if sort in SORTS else "ended",
            down=given.get("down", "1") != "0",
            page=max(1, int(page)) if page.isdecimal() and len(page) < 9 else 1,
        )

    def link(self, **changes: object) -> str:
        """The query string of this query with some changes; what is at its default is left out."""
        changed = msgspec.structs.replace(self, **({"page": 1} | changes))
        fields = {name.rstrip("_"): getattr(changed, name) for name in (*FILTERS, "sort", "page")}
        kept = {name: value for name, value in fields.items() if value not in ("", 1) and (name, value) != ("sort", "ended")}
        return urlencode(kept | ({} if changed.down else {"down": "0"}))

    def by(self, column: str) -> str:
        """The link in a column's head: sort by it, or the other way round."""
        return self.link(sort=column, down=not self.down if self.sort == column else True)

    @property
    def is_filtered(self) -> bool:
        return any(getattr(self, name) for name in FILTERS)


FILTERS: Final = ("kind", "task", "end", "reward", "with_", "step", "version", "group", "text")


class ExecutionPage(NamedTuple):
    rows: Sequence[ExecutionEntry]
    num_found: int
    page: int
    num_pages: int


def find_page(
    entries: Iterable[ExecutionEntry], groups: Mapping[GroupId, GroupEntry], mixed: frozenset[GroupId], query: ExecutionQuery
) -> ExecutionPage:
    """The rows of one page. `mixed`: groups whose rewards are not all equal. A page past the last is the last one."""
    tests = list(_tests(groups, mixed, query))
    found = [entry for entry in entries if all(test(entry) for test in tests)]
    found.sort(key=SORTS[query.sort], reverse=query.down)  # type: ignore[arg-type]
    num_pages = max(1, math.ceil(len(found) / PAGE_SIZE))
    page = min(query.page, num_pages)
    return ExecutionPage(found[(page - 1) * PAGE_SIZE : page * PAGE_SIZE], len(found), page, num_pages)


Test = Callable[[ExecutionEntry], bool]


def _tests(groups: Mapping[GroupId, GroupEntry], mixed: frozenset[GroupId], query: ExecutionQuery) -> Iterable[Test]:
    if query.kind:
        yield lambda e: e.kind == query.kind
    if query.task:
        yield lambda e: e.task == query.task
    if query.end:
        yield lambda e: query.end in (e.end, e.validity)
    if query.reward in REWARDS:
        yield REWARDS[query.reward]
    if query.reward == "spread":
        yield lambda e: e.group in mixed
    if query.with_ in WITH:
        yield WITH[query.with_]
    if query.step:
        yield lambda e: str(groups[e.group].step) == query.step
    if query.version:
        yield lambda e: str(e.version) == query.version
    if query.group:
        yield lambda e: str(e.group) == query.group
    if query.text:
        wanted = query.text.lower()
        yield lambda e: wanted in e.execution or wanted in e.task.lower() or wanted in e.end or wanted in e.detail.lower()


REWARDS: Final[dict[str, Test]] = {
    "zero": lambda e: e.counted_reward == 0,
    "partial": lambda e: e.counted_reward is not None and 0 < e.counted_reward < 1,
    "one": lambda e: e.counted_reward is not None and e.counted_reward >= 1,
    "none": lambda e: e.counted_reward is None,
}
WITH: Final[dict[str, Test]] = {
    "sub-agents": lambda e: e.sub_agents > 0,
    "compactions": lambda e: e.compactions > 0,
    "moves": lambda e: e.calls_moved > 0,
    "detail": lambda e: bool(e.detail),
}
