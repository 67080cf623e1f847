"""The site of the documentation leads to every page, and to no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests.arch.source import ROOT

GENERATED = {"reference/run-file.md", "reference/commands.md", "reference/metrics.md", "reference/python.md"}
"""Made by checks/docs_site.py when the site is built."""


def pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from pages(target) if isinstance(target, list) else [target]


def test_every_page_stands_in_the_navigation_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = list(pages(site["nav"]))
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(there | GENERATED | {"decisions/README.md"})
