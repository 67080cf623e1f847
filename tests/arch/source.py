"""The package's sources, parsed once."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PURE_FOLDERS = ("core", "trajectory", "buffer", "scheduler", "gateway/protocol")


class Module(NamedTuple):
    path: Path
    """Relative to the repository."""
    tree: ast.Module
    num_lines: int


def modules(*folders: str) -> list[Module]:
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Module(path.relative_to(ROOT), ast.parse(text), text.count("\n") + 1))
    return found


def pure_modules() -> list[Module]:
    return modules(*(f"qwengyre/{folder}" for folder in PURE_FOLDERS))


def imported(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, full name) of everything that a module imports, wherever it does."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return names


def expect_none(found: list[str]) -> None:
    """Fails with every entry on a line of its own."""
    assert not found, "\n" + "\n".join(found)
