"""A hook of mkdocs: the pages of the reference, made of the code itself, and links that leave docs/. `make docs`."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec
import typer
from mkdocs.structure.files import File, Files
from typer.core import TyperGroup

import qwengyre
from qwengyre.cli.main import COMMANDS, application
from qwengyre.config.dump import dump_value
from qwengyre.config.shape import keys
from qwengyre.runtime.run_config import RunConfig
from qwengyre.telemetry import records

NOTE = "*This page is made of the code of this version.*"
AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the reference, and the files of the repository's root that pages lead to."""
    pages = {"run-file": run_file(), "commands": commands(), "metrics": metrics(), "python": python()}
    for name, lines in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ lead nowhere in a site: their text stays."""
    names = "|".join(re.escape(name) for name in AT_THE_ROOT)
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./)+(?:{names})[^)]*\)", r"\1", markdown)


def cell(text: str) -> str:
    """In one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def run_file() -> Iterator[str]:
    yield from ("# Run file", "", NOTE, "", "`qwengyre config explain KEY` prints the same.")
    table: tuple[str, ...] = ()
    for key in keys(RunConfig):
        if key.path[:-1] != table:
            table = key.path[:-1]
            yield from ("", f"## {'.'.join(table)}", "", "| key | default | type | meaning |", "| --- | --- | --- | --- |")
        given = key.default is not msgspec.NODEFAULT
        default = msgspec.to_builtins(key.default) if given else None
        shown = "must be given" if not given else "" if default is None else f"`{cell(dump_value(default))}`"
        yield f"| `{key.path[-1]}` | {shown} | {cell(str(key.kind))} | {cell(key.doc)} |"


def commands() -> Iterator[str]:
    yield from ("# Commands", "", NOTE)
    for words in command_names(COMMANDS):
        command, context = found(words)
        yield from ("", f"## qwengyre {' '.join(words)}", "", inspect.cleandoc(command.help or ""), "")
        yield from ("| argument or option | meaning |", "| --- | --- |")
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            name = record[0] if record else parameter.human_readable_name
            meaning = record[1] if record else getattr(parameter, "help", "") or ""
            yield f"| `{cell(name)}` | {cell(re.sub(r'  +', ' ', meaning))} |"


def command_names(table: Mapping[str, tuple[str, str]], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, (target, _) in table.items():
        module, _, function = target.partition(":")
        loaded = getattr(importlib.import_module(module), function)
        if isinstance(loaded, Mapping):
            yield from command_names(loaded, (*above, name))
        else:
            yield (*above, name)


def found(words: tuple[str, ...]) -> tuple[Any, typer.Context]:
    current: Any = typer.main.get_command(application(list(words)))
    context = typer.Context(current, info_name="qwengyre")
    for word in words:
        assert isinstance(current, TyperGroup)
        inner = current.get_command(context, word)
        assert inner is not None, words
        current, context = inner, typer.Context(inner, info_name=word, parent=context)
    return current, context


def metrics() -> Iterator[str]:
    yield from ("# Metrics", "", NOTE, "", inspect.cleandoc(records.__doc__ or ""))
    for kind in get_args(records.MetricRecord):
        yield from (
            "",
            f"## {kind.__name__}",
            "",
            inspect.cleandoc(kind.__doc__ or ""),
            "",
            "| field | meaning |",
            "| --- | --- |",
        )
        documented = documented_fields(kind)
        for field in msgspec.structs.fields(kind):
            yield f"| `{field.name}` | {cell(documented.get(field.name, ''))} |"


def documented_fields(kind: type) -> dict[str, str]:
    """The texts below a struct's fields."""
    source = inspect.getsource(kind)
    return {name: text for name, text in re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.M | re.S)}


def python() -> Iterator[str]:
    yield from (
        "# Python",
        "",
        NOTE,
        "",
        "[From Python](../from-python.md) has examples; these are all public names of `qwengyre`.",
    )
    for name in sorted(qwengyre.__all__):
        thing = getattr(qwengyre, name)
        yield from ("", f"## {name}", "")
        if callable(thing):
            yield from ("```python", f"{name}{signature(thing)}", "```", "", inspect.cleandoc(inspect.getdoc(thing) or ""))
        else:
            yield f"`{thing!r}`"


def signature(thing: Any) -> str:
    try:
        return re.sub(r"\bqwengyre\.(\w+\.)*", "", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return "(...)"


os.environ.setdefault("COLUMNS", "120")
