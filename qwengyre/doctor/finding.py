"""One finding, and the runner that turns an examination that breaks into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

Verdict = Literal["ok", "note", "missing"]


class Finding(msgspec.Struct, frozen=True):
    what: str
    verdict: Verdict
    found: str
    todo: str = ""
    """What to do; empty when nothing is."""
    node: str = ""
    """Address of the machine, in a cluster."""


Examination = Callable[[], list[Finding]]


def examine(examinations: Iterable[Examination]) -> list[Finding]:
    """All findings, in order. A file that this system lacks or a call that it forbids is a finding, not a crash."""
    findings = []
    for examination in examinations:
        try:
            findings += examination()
        except OSError as error:
            what = examination.__name__.replace("_", " ")
            findings.append(Finding(what, "note", f"cannot be examined: {error}", "see whether this user may look at it"))
    return findings
