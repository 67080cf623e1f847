"""The package's sources, parsed once for all tests."""

from __future__ import annotations

import ast
import gc
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
PURE_FOLDERS = ("core", "trajectory", "buffer", "scheduler", "gateway/protocol")
Kind = TypeVar("Kind", bound=ast.AST)


class Module:
    def __init__(self, path: Path) -> None:
        self.path = path
        """Relative to the repository."""
        self.text = (ROOT / path).read_text(encoding="utf-8")
        self.num_lines = self.text.count("\n") + 1
        self.tree = ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def all_of(self, *kinds: type[Kind]) -> list[Kind]:
        """Every node of one of these kinds, outer ones first."""
        return [node for node in self.nodes if isinstance(node, kinds)]


@cache
def _modules_below(folder: str) -> tuple[Module, ...]:
    """Parsed without the garbage collector: it would walk half a million nodes again and again, and finds no garbage there."""
    gc.disable()
    try:
        found = tuple(Module(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*.py")))
        assert all(module.nodes for module in found)
    finally:
        gc.freeze()
        gc.enable()
    return found


def modules(*folders: str) -> list[Module]:
    """Those in a folder of the repository; deeper ones too."""
    found = []
    for folder in folders:
        top, _, rest = folder.partition("/")
        found += [module for module in _modules_below(top) if module.path.is_relative_to(Path(top, rest))]
    return found


def pure_modules() -> list[Module]:
    return modules(*(f"qwengyre/{folder}" for folder in PURE_FOLDERS))


def imported(module: Module) -> list[tuple[int, str]]:
    """(line, full name) of everything that a module imports, wherever it does."""
    names = []
    for node in module.all_of(ast.Import, ast.ImportFrom):
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names += [(node.lineno, prefix + alias.name) for alias in node.names]
    return names


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` of a name or an attribute of one; of another expression nothing, and then what is taken of it."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


def expect_none(found: list[str]) -> None:
    """Fails with every entry on a line of its own."""
    assert not found, "\n" + "\n".join(found)
