"""Every test that the threat model names is there."""

from __future__ import annotations

import re

from tests.arch.source import ROOT, expect_none

NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_attacks_have_their_tests():
    named = NAMED.findall((ROOT / "docs/threat-model.md").read_text())
    assert len(named) > 40
    lost = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    expect_none(lost)
