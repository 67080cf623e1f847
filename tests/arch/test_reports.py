"""Every report has its row, and every test that a row names is there."""

from __future__ import annotations

import re

from tests.arch.source import ROOT, expect_none

PAGE = ROOT / "docs/reports.md"
NAMED = re.compile(r"`((?:checks/)?[\w/]+\.py)::(test_\w+)`")
NUM_REPORTS = {"R": 14, "N": 36}


def test_every_report_has_a_row():
    rows = re.findall(r"^\| ([RN])(\d+) \|", PAGE.read_text(), re.MULTILINE)
    wanted = [(kind, number) for kind, most in NUM_REPORTS.items() for number in range(1, most + 1)]
    assert [(kind, int(number)) for kind, number in rows] == wanted


def test_reports_have_their_tests():
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 70
    places = [(ROOT / file if file.startswith("checks/") else ROOT / "tests" / file, name) for file, name in named]
    expect_none([f"{file}::{name}" for file, name in places if not file.exists() or f"def {name}(" not in file.read_text()])
