"""Whatever README and docs show to be typed or written works: commands are taken by the program, files by what reads them.

A fenced block that is neither says here why, or by which test it is run.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.core import TyperGroup

from qwengyre.cli.main import application
from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.config.load import loads
from qwengyre.runtime.run_config import RunConfig
from qwengyre.sandbox.task import check_task

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
TASK = {"instruction.md": "Do it.", "environment/a.txt": "a", "tests/test.sh": 'echo 1 > "$VERIFIER_DIR/reward.txt"\n'}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ELSEWHERE = {
    "my-tasks/\n": "a listing of files",
    "f.py: f(x)": "a task's words",
    "openssl req -x509": "for OpenSSL; tests/unit/rpc/test_tls.py makes such certificates by a library",
    "location /0/": "for a proxy of others, which is not run here",
    " harness (any program": "a drawing",
    " bytes ──protocol/": "a drawing",
    "submit -> waiting": "a drawing",
    "MicroStep ──": "a drawing",
    "CallStarted, TokensSampled": "a drawing",
    "bench\ncli\n": "tests/arch/test_layers.py",
    "stateDiagram-v2": "tests/unit/scheduler/test_docs.py",
    "# tests/test.sh": "tests/unit/sandbox/test_mini_repositories.py",
    "child = os.fork()": "tests/unit/sandbox/test_mini_repositories.py",
    "# /opt/my_agent.py": "compiled below; tests/integration/run_kit.py has one like it, which runs",
    "python3.12 -m venv .harbor": "the Makefile: `make test-harbor` installs it",
    "python3 -m venv /opt/mini": "the Makefile: `make test-harnesses` installs it",
}
"""Blocks that are not held here, by how they begin: what they are, or the test that holds them."""


class Block(msgspec.Struct, frozen=True):
    where: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[1], found[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
ROWS = [(page, row) for page in PAGES for row in re.findall(r"`(qwengyre [a-z-][^`]*)`", page.read_text(encoding="utf-8"))]


def elsewhere(block: Block) -> str | None:
    if block.where.startswith("docs/from-python.md"):
        return "tests/unit/test_from_python.py"
    if block.where.startswith("docs/hooks.md") and block.language == "python":
        return "tests/unit/hooks/test_page.py"
    return next((held for start, held in ELSEWHERE.items() if block.text.startswith(start)), None)


def commands_of(text: str) -> list[str]:
    """The lines without what is said of them."""
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def take(command: str) -> None:
    """Read the arguments of a `qwengyre` command as the program does, and start nothing."""
    words = shlex.split(command.replace("RUN...", "RUN"))[1:]
    current: Any = typer.main.get_command(application(words))
    context = typer.Context(current)
    while isinstance(current, TyperGroup) and words and not words[0].startswith("-"):
        name, current, words = current.resolve_command(context, words)
        assert current is not None, command
        context = typer.Context(current, info_name=name, parent=context)
    current.make_context(context.info_name, words, parent=context.parent)


def test_there_are_pages_with_blocks():
    assert len(PAGES) > 20 and len(BLOCKS) > 30 and len(ROWS) > 30


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_every_block_is_run_or_says_why_not(block, tmp_path):
    held = elsewhere(block)
    if held is not None:
        if held.startswith("tests/"):
            assert (ROOT / held).is_file()
        if block.language == "python" and not block.text.startswith("child"):
            compile(block.text, block.where, "exec")
        return
    if block.language == "toml":
        read_toml(block.text, tmp_path)
        return
    commands = commands_of(block.text)
    assert commands, f"{block.where}: neither commands nor told in ELSEWHERE"
    for command in commands:
        if command.startswith("make "):
            assert re.search(rf"^{re.escape(command.split()[1])}:", MAKEFILE, re.M), command
        else:
            assert command.startswith("qwengyre "), f"{block.where}: {command!r} is told nowhere"
            take(command)


def read_toml(text: str, folder: Path) -> None:
    """As what reads such a file does: a task's, a table of rules, or a part of a run file."""
    if text.startswith("# task.toml"):
        for name, content in TASK.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        (folder / "task.toml").write_text(text)
        assert check_task(folder)[1] == []
    elif "[[harness]]" in text:
        (folder / "rules.toml").write_text(text)
        assert read_harness_rules(str(folder / "rules.toml"))
    else:
        needed = {"harness": 'command = ["agent"]', "tasks": 'train = "a"\nheld_out = "b"'}
        rest = [f"[{table}]\n{keys}" for table, keys in needed.items() if table not in tomllib.loads(text)]
        loads("\n".join((text, *rest)), RunConfig)


@pytest.mark.parametrize(("page", "row"), ROWS, ids=[f"{page.name} {row}" for page, row in ROWS])
def test_every_command_that_a_page_names_is_taken(page, row):
    command = re.sub(r" \[([^]]*)\]", r" \1", row)  # what may be left out
    if re.search(r"\.\.\.(?!\.)| KEY$", command) and "RUN..." not in command:
        command = command.partition(" ...")[0]
    try:
        take(command)
    except typer.TyperException as error:  # in running text a command may stand without its arguments, or with a word for one
        assert type(error).__name__ in ("MissingParameter", "BadOptionUsage", "BadParameter"), error


def test_a_command_that_does_not_exist_is_not_taken():
    for wrong in (
        "qwengyre nonsense",
        "qwengyre train --nonsense run.toml",
        "qwengyre tasks nonsense",
        "qwengyre train a.toml b.toml",
    ):
        with pytest.raises(typer.TyperException):
            take(wrong)
