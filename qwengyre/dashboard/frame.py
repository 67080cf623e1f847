"""The templates of the dashboard's pages, and its few files.

Every text goes through `printable` and is escaped: what a policy or a harness wrote is never markup, whatever page it stands in. Only
what our own functions drew (`drawn`) is put in as it is.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import qwengyre
from qwengyre.core.text import printable
from qwengyre.dashboard.page import PAGE_STYLE, PICTURE_STYLE
from qwengyre.dashboard.tree_rows import numbers
from qwengyre.dashboard.view import clock, quantity

STATIC: Final = {"dashboard.css": "text/css", "live.js": "text/javascript", "keys.js": "text/javascript"}


def drawn(markup: str) -> Markup:
    """HTML that functions of ours made, who escaped what they quote."""
    return Markup(markup)


def render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(values)


@cache
def static_file(name: str) -> str:
    """Raises KeyError for a name that is not one of our files."""
    if name not in STATIC:
        raise KeyError(name)
    text = files("qwengyre.dashboard").joinpath("static", name).read_text(encoding="utf-8")
    return PICTURE_STYLE + PAGE_STYLE + text if name == "dashboard.css" else text


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("qwengyre.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "clock": lambda value: "" if value is None else clock(value),
        "quantity": lambda value: "" if value is None else quantity(float(value)),
        "score": lambda value: "" if value is None else f"{value:.2f}",
        "signed": lambda value: "" if value is None else f"{value:+.3f}",
        "logprob": lambda value: "" if value is None else f"{value:.3f}",
        "count": lambda value: "" if value is None else f"{value:,}",
        "ranges": lambda values: numbers(tuple(sorted(set(values)))),
        "bytes": _bytes,
    }
    environment.globals["program_version"] = qwengyre.__version__
    return environment


def _shown(value: object) -> object:
    """A value about to be written: text with what acts on a reader's screen as escapes, nothing for None."""
    if value is None:
        return ""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _bytes(value: int) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB" if value >= 1e3 else f"{value} B"
