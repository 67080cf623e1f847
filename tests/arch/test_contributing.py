"""What CONTRIBUTING.md sends a contributor to exists, and every kind of thing that can be added is told."""

from __future__ import annotations

import re

import pytest

from tests.arch.source import ROOT, expect_none

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_place_that_it_names_exists():
    places = re.findall(r"`((?:qwengyre|tests|checks|docs)/[\w./-]*)`", PAGE) + re.findall(r"\]\(([\w./-]+)[#)]", PAGE)
    assert len(places) > 20
    expect_none([place for place in places if not (ROOT / place).exists()])


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make ([\w-]+)", PAGE, re.M))))
def test_every_target_that_it_names_exists(target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def test_every_kind_that_can_be_added_is_told():
    told = re.findall(r"^\| an? ([a-z ]+?)(?: of weights and KV)? \| ", PAGE, re.M)
    assert {"harness", "engine", "transport", "launcher", "objective", "scheduler policy", "dialect", "command", "bench"} <= set(
        told
    )
