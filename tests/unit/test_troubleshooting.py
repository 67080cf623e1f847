"""What docs/troubleshooting.md quotes is said by the program, and the keys that it names are keys."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from qwengyre.runtime.run_config import RunConfig
from tests.arch.source import modules

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    quoted
    for line in TEXT.splitlines()
    if line.startswith("| ") and line.count("|") > 3
    for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    if " " in quoted
]
TABLES = {field.name: field.type for field in msgspec.structs.fields(RunConfig)}
KEYS = sorted({key for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", TEXT) if key.split(".")[0] in {*TABLES, "limits"}})


def said() -> str:
    """Every text in the sources, one after another, as a user reads it: parts that stand in several literals are joined."""
    texts = []
    for module in modules("qwengyre"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_what_is_quoted_is_said():
    assert len(QUOTED) > 8
    spoken = said()
    assert [quoted for quoted in QUOTED if quoted not in spoken] == []


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_a_key(key: str):
    table, name = key.split(".")
    owner = TABLES["harness"] if table == "limits" else TABLES[table]
    if table == "limits":
        owner = next(field.type for field in msgspec.structs.fields(owner) if field.name == "limits")
    assert name in {field.name for field in msgspec.structs.fields(owner)}
