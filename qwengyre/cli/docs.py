"""`qwengyre docs [PAGE]`: the documentation of this very version, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from qwengyre.cli.output import say, say_data
from qwengyre.config.installation import shipped
from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest
from qwengyre.dashboard.terminal import SafeConsole


def docs(
    page: Annotated[
        str, typer.Argument(metavar="PAGE", help="The page's name, such as training; without one all are listed.")
    ] = "",
    raw: Annotated[bool, typer.Option("--raw", help="The page's Markdown as it is.")] = False,
) -> None:
    """List the pages of the documentation, or show one."""
    pages = find_pages()
    if not page:
        width = max(map(len, pages))
        for name, path in pages.items():
            say(f"{name:{width}}  {_title(path)}")
        return
    found = pages.get(page.removeprefix("docs/").removesuffix(".md"))
    if found is None:
        near = nearest(page, tuple(pages))
        raise ConfigError(
            f"there is no page {page!r}{f' (did you mean {near}?)' if near else ''}: `qwengyre docs` lists them", key="PAGE"
        )
    text = found.read_text(encoding="utf-8")
    if raw:
        say_data(text)
    else:
        SafeConsole().print(Markdown(text))


def find_pages() -> dict[str, Path]:
    """Name -> file of every page, decisions left out: they are for those who change the code."""
    folder = shipped("docs")
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def _title(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
