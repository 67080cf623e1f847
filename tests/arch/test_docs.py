"""What a page names in backticks exists: files, make targets, commands, keys, options, and names in the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from qwengyre.cli.main import COMMANDS
from qwengyre.config.convert import RENAMED
from qwengyre.runtime.run_config import RunConfig
from tests.arch.source import ROOT, expect_none

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = ("qwengyre", "qwengyre_harness", "checks", "recipes", ".ci")
FOREIGN = {
    "ANTHROPIC_": "how names of variables begin",
    "BASH_ENV": "a variable of bash",
    "NODE_OPTIONS": "a variable of Node.js",
    "my_rewards": "a module of a user's",
    "my_rewards.py": "the file of it",
    "no_new_privs": "a flag of Linux",
    "ray.cluster_utils": "a module of Ray",
    "tests/score.py": "a file of a task",
    "tests/test.sh": "a file of a task",
    "WANDB_API_KEY": "a variable of wandb",
    "vllm.entrypoints.openai.api_server": "a module of vLLM",
}
"""Name -> what it is, since it is not ours."""


@cache
def words() -> frozenset[str]:
    """Every word of the code, of files' names, and of what is configured."""
    paths = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    paths += [ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-vllm.txt")]
    found: set[str] = set()
    for path in paths:
        found |= {path.name, path.stem}
        if path.suffix != ".gz":
            found |= set(re.findall(r"[A-Za-z_][\w-]*|\w+", path.read_text(encoding="utf-8", errors="replace")))
    found |= {name for path in (ROOT / "tests").rglob("*.py") for name in (path.name, path.stem)}
    found |= {part for word in found for part in re.split(r"[-]", word)}
    return frozenset(found)


def names(page: Path) -> list[str]:
    """What stands in backticks and looks like a name: with an underscore, a dot, a capital inside, or called."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    quoted = re.findall(r"`([^`\n]+)`", text)
    return [name for name in quoted if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", name) and re.search(r"[_.(]|[a-z][A-Z]", name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page: Path):
    expect_none(
        [
            name
            for name in names(page)
            if name not in FOREIGN and not all(part in words() for part in re.split(r"[.()]+", name) if part)
        ]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    places = re.findall(r"`((?:qwengyre|qwengyre_harness|tests|checks|docs|recipes)/[\w./-]*)`", text)
    links = [page.parent / target for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text)]
    expect_none(
        [place for place in places if place not in FOREIGN and not (ROOT / place).exists()]
        + [str(link) for link in links if not link.exists()]
    )


def quoted(pattern: str) -> list[tuple[str, str]]:
    """(page, match) of `pattern`, which has one group, in backticks and in blocks of code."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```.*?^```", text, re.M | re.S)
        found += [(str(page.relative_to(ROOT)), match) for piece in code for match in re.findall(pattern, piece, re.M)]
    return found


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    told = quoted(r"^(?:\$ )?make ([a-z][\w-]*)")
    assert len(told) > 10
    expect_none([f"{page}: make {target}" for page, target in told if target not in targets])


def test_commands_exist():
    told = quoted(r"^(?:\$ )?(?:\S*/)?qwengyre ([a-z][\w-]*)")
    assert len(told) > 10
    expect_none([f"{page}: qwengyre {command}" for page, command in told if command not in COMMANDS])


def test_keys_exist():
    sections = {
        section.name: {key.name for key in section.type.fields} for section in msgspec.inspect.type_info(RunConfig).fields
    }
    told = [
        (page, *key.split(".")) for page, key in quoted(r"^([a-z_]+\.[a-z_]+)(?: = .*)?$") if not key.endswith((".py", ".toml"))
    ]
    told = [(page, section, key) for page, section, key in told if section in sections and f"{section}.{key}" not in FOREIGN]
    assert len(told) > 50
    expect_none(
        [
            f"{page}: {section}.{key}"
            for page, section, key in told
            if key not in sections[section] and (section, key) not in RENAMED
        ]
    )
