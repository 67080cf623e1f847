"""One class name, one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

from tests.arch.source import expect_none, modules

PASSED_ON = {
    "BeginStep",
    "Compute",
    "SaveCheckpoint",
}
"""What the scheduler decides, a cell is asked for, and its ranks and engine do: the same request, one hop further on."""
HOPS = {"qwengyre/scheduler/commands.py", "qwengyre/cell/api.py", "qwengyre/cell/ranks/api.py", "qwengyre/engines/wire.py"}


@cache
def public_classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules("qwengyre"):
        for node in module.all_of(ast.ClassDef):
            if not node.name.startswith("_"):
                found[node.name].append(str(module.path))
    return found


def test_no_class_name_stands_for_two_things():
    expect_none(
        [
            f"{name}: {', '.join(places)}"
            for name, places in sorted(public_classes().items())
            if len(places) > 1 and not (name in PASSED_ON and set(places) <= HOPS)
        ]
    )


def test_every_exception_is_still_one():
    found = public_classes()
    expect_none([name for name in sorted(PASSED_ON) if len(found.get(name, [])) < 2])
