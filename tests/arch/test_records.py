"""What a record holds, somebody reads: a field that only tests look at says nothing to anyone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.arch.source import ROOT, expect_none, modules

RECORDS = {"Struct"}
"""And dataclasses. What derives from NamedTuple is read by position, too."""
PAGES = ("qwengyre/**/*.html", "qwengyre/**/*.js", "qwengyre/**/*.cpp", "qwengyre/**/*.c")
"""What is no Python and reads records all the same: the dashboard's pages, by name."""
AS_A_WHOLE = {
    "DashboardFigures": "its bench prints it",
    "FairnessFigures": "its bench prints it",
    "GatewayFigures": "its bench prints it",
    "GatewaysFigures": "its bench prints it",
    "ReadFigures": "its bench prints it",
    "GatewayStats": "the gateway logs it when it stops",
    "Moved": "the gateway logs it",
}
"""Record -> who reads all of its fields without naming them."""
FOR_OTHERS = {
    "EndedExecution.is_scored": "for hooks of a user's own (docs/hooks.md)",
    "EndedExecution.num_tokens_sampled": "for hooks of a user's own",
    "ExecutionOver.num_tokens_sampled": "for hooks of a user's own",
    "Ignored.because": "docs/gateway.md has it",
    "RandomCall.was_answered": "tests/property/test_tree.py holds trees to it",
    "RunOpened.life": "for people who look into the journal",
    "RunOpened.wall_time": "for people who look into the journal",
    "ScoredExecution.task_folder": "for hooks of a user's own",
    "ScoredExecution.transcript": "for hooks of a user's own",
    "StepPoisoned.kept_in": "for people who look into the journal: where the micro-step lies",
}
"""Field -> who outside the package reads it."""


def _is_record(node: ast.ClassDef, names: set[str]) -> bool:
    bases = {
        base.attr if isinstance(base, ast.Attribute) else base.id
        for base in node.bases
        if isinstance(base, ast.Name | ast.Attribute)
    }
    return bool(bases & names) or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


class Field(NamedTuple):
    record: str
    name: str
    place: str


@cache
def fields() -> list[Field]:
    names = set(RECORDS)
    classes = [(module, node) for module in modules("qwengyre") for node in module.all_of(ast.ClassDef)]
    for _ in range(3):  # records that derive from records
        names |= {node.name for _, node in classes if _is_record(node, names)}
    return [
        Field(node.name, line.target.id, f"{module.path}:{line.lineno}")
        for module, node in classes
        if _is_record(node, names)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and "ClassVar" not in ast.unparse(line.annotation)
    ]


def read_names() -> Iterator[str]:
    for module in modules("qwengyre", "qwengyre_harness", "checks"):
        for node in module.all_of(ast.Attribute, ast.Constant, ast.MatchClass):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    yield name
                case ast.Constant(value=str(name)):
                    yield name
                case ast.MatchClass(kwd_attrs=names):
                    yield from names
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            yield from re.findall(r"\w+", path.read_text(encoding="utf-8"))


def unread() -> list[Field]:
    read = set(read_names())
    return [field for field in fields() if field.name not in read]


def test_every_field_of_a_record_is_read():
    expect_none(
        [
            f"{field.place} {field.record}.{field.name}"
            for field in unread()
            if field.record not in AS_A_WHOLE and f"{field.record}.{field.name}" not in FOR_OTHERS
        ]
    )


def test_exceptions_are_of_records_that_are_there():
    known = fields()
    expect_none([name for name in AS_A_WHOLE if name not in {field.record for field in known}])
    expect_none([name for name in FOR_OTHERS if name not in {f"{field.record}.{field.name}" for field in known}])
