"""Where links lead, told as the kernel would follow them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.sandbox.links import Lead, LinkResolver, LinkRule

RULE = LinkRule(roots=("/workspace", "/app"), visible=("/usr", "/opt/python"))


def leads(root: Path, folder: str, target: str, rule: LinkRule = RULE) -> Lead:
    opened = os.open(root, os.O_RDONLY)
    try:
        return LinkResolver(opened, rule).leads([part for part in folder.split("/") if part], target)
    finally:
        os.close(opened)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """up -> .., deep/up2 -> ../.., deep/in -> ., chain -> deep/up2/x, abs -> /workspace/deep, out -> /tests, loop -> loop."""
    folder = tmp_path / "workspace"
    (folder / "deep/deeper").mkdir(parents=True)
    for name, target in {
        "up": "..",
        "deep/up2": "../..",
        "deep/in": ".",
        "chain": "deep/up2/x",
        "abs": "/workspace/deep",
        "out": "/tests",
        "loop": "loop",
    }.items():
        (folder / name).symlink_to(target)
    return folder


@pytest.mark.parametrize(
    ("folder", "target", "lead"),
    [
        ("", "a", Lead.INSIDE),
        ("", "not/there/yet", Lead.INSIDE),
        ("deep", "../a", Lead.INSIDE),
        ("deep/deeper", "../../x", Lead.INSIDE),
        ("", "deep/in/in/deeper/..", Lead.INSIDE),
        ("", "/workspace", Lead.INSIDE),
        ("", "/app/deep/../a", Lead.INSIDE),
        ("", "../workspace/a", Lead.INSIDE),
        ("deep", "../../app/../workspace//./a", Lead.INSIDE),
        ("", "abs/../a", Lead.INSIDE),
        ("", "/usr/bin/python3", Lead.INSIDE),
        ("", "/opt/python/bin/python", Lead.INSIDE),
        ("", "loop", Lead.LOOP),
        ("", "loop/x", Lead.LOOP),
        ("", "/tests/expected.txt", Lead.OUTSIDE),
        ("", "/workspaces/x", Lead.OUTSIDE),
        ("", "/workspace/../tests/x", Lead.OUTSIDE),
        ("", "/app/../tests", Lead.OUTSIDE),
        ("", "../tests/x", Lead.OUTSIDE),
        ("deep", "../../tests", Lead.OUTSIDE),
        ("", "..", Lead.OUTSIDE),
        ("", "/", Lead.OUTSIDE),
        ("", "//tests", Lead.OUTSIDE),
        ("", "up/tests/x", Lead.OUTSIDE),
        ("", "deep/up2/tests", Lead.OUTSIDE),
        ("", "chain", Lead.OUTSIDE),
        ("", "abs/../../tests", Lead.OUTSIDE),
        ("", "out/expected.txt", Lead.OUTSIDE),
        ("", "/usr/../tests/x", Lead.OUTSIDE),
        ("", "/usr/../usr/bin", Lead.OUTSIDE),
        ("", "/usrx", Lead.OUTSIDE),
        ("", "/proc/self/root/tests", Lead.OUTSIDE),
        ("", "/dev/fd/3", Lead.OUTSIDE),
        ("", "a/" * 3000, Lead.OUTSIDE),
    ],
)
def test_a_link_leads_where_the_kernel_would_follow_it(root, folder, target, lead):
    assert leads(root, folder, target) is lead


def test_without_names_of_its_own_every_absolute_link_leads_out(root):
    for target in ("/workspace/a", "/usr/bin", "../workspace/a"):
        assert leads(root, "", target, LinkRule()) is Lead.OUTSIDE


def test_links_that_take_long_to_follow_are_given_up(tmp_path):
    """40 links with 2,000 parts each, 20,000 times, would be hours."""
    for n in range(40):
        (tmp_path / f"l{n}").symlink_to("./" * 1500 + (f"l{n + 1}" if n < 39 else "end"))
    for n in range(40):
        (tmp_path / f"d{n}").symlink_to("x/../" * 800 + (f"d{n + 1}" if n < 39 else "end"))
    opened = os.open(tmp_path, os.O_RDONLY)
    resolver = LinkResolver(opened, RULE)
    found = [resolver.leads([], "d0") for _ in range(60)]
    os.close(opened)
    assert found[0] is Lead.INSIDE and found[-1] is Lead.OUTSIDE


parts = st.sampled_from(["a", "b", "..", ".", "l0", "l1", "l2"])
targets = st.lists(parts, min_size=1, max_size=5).map("/".join)


@settings(max_examples=200, deadline=None)
@given(links=st.lists(targets, min_size=3, max_size=3), target=targets)
def test_what_is_called_inside_is_never_outside_for_the_kernel(tmp_path_factory, links, target):
    base = tmp_path_factory.mktemp("l")
    root = base / "workspace"
    (root / "a/b").mkdir(parents=True)
    (root / "b").mkdir()
    for n, link in enumerate(links):
        (root / f"l{n}").symlink_to(link)
    lead = leads(root, "", target)
    (root / "tested").symlink_to(target)
    try:
        found = os.path.realpath(root / "tested", strict=True)
    except OSError:
        return
    assert (lead is Lead.INSIDE) == (found == str(root) or found.startswith(f"{root}/")), (links, target, found)
