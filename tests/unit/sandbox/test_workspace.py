"""Workspaces: copied as they are, digested by content, hostile ones bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.limits import disk_usage
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.workspace import copy_workspace, move_tree, prepare_workspace, remove_tree

LIMITS = LimitsConfig(disk_mb=1, files=50)


def build(folder: Path, tree: dict[str, bytes | None]) -> Path:
    """Files with contents, folders with None."""
    folder.mkdir()
    for path, data in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).mkdir() if data is None else (folder / path).write_bytes(data)
    return folder


def shape(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_the_environment_is_copied_without_its_image_description(tmp_path):
    build(tmp_path / "t", {"environment/Dockerfile": b"FROM x", "environment/a/b.txt": b"data", "environment/run.sh": b"#!"})
    (tmp_path / "t/environment/run.sh").chmod(0o755)
    (tmp_path / "t/environment/link").symlink_to("a/b.txt")
    prepare_workspace(Task("t", str(tmp_path / "t"), "x", 1.0, 1.0), tmp_path / "w")
    assert shape(tmp_path / "w") == {"a": None, "a/b.txt": b"data", "run.sh": b"#!", "link": "a/b.txt"}
    assert os.access(tmp_path / "w/run.sh", os.X_OK)


def test_an_empty_task_gives_an_empty_workspace(tmp_path):
    (tmp_path / "t").mkdir()
    prepare_workspace(Task("t", str(tmp_path / "t"), "x", 1.0, 1.0), tmp_path / "w")
    assert shape(tmp_path / "w") == {}


names = st.text("ab", min_size=1, max_size=3)
trees = st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), st.binary(max_size=20), max_size=6)


def well_formed(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Without paths below a file."""
    return {
        path: data for path, data in tree.items() if not any(other != path and path.startswith(other + "/") for other in tree)
    }


@settings(max_examples=60, deadline=None)
@given(one=trees.map(well_formed), other=trees.map(well_formed))
def test_digests_are_equal_exactly_for_equal_trees(tmp_path_factory, one, other):
    base = tmp_path_factory.mktemp("w")
    first = copy_workspace(build(base / "a", one), base / "a2", LIMITS)
    second = copy_workspace(build(base / "b", other), base / "b2", LIMITS)
    assert (first == second) == (shape(base / "a") == shape(base / "b"))
    assert shape(base / "a2") == shape(base / "a")


def test_the_digest_sees_bits_and_links(tmp_path):
    digests = set()
    for index, change in enumerate(("plain", "executable", "link")):
        folder = build(tmp_path / str(index), {"a": b"x", "b": b"x"})
        if change == "executable":
            (folder / "a").chmod(0o755)
        if change == "link":
            (folder / "a").unlink()
            (folder / "a").symlink_to("b")
        digests.add(copy_workspace(folder, tmp_path / f"{index}-copy", LIMITS))
    assert len(digests) == 3


def test_special_files_are_left_out_and_links_are_not_followed(tmp_path):
    folder = build(tmp_path / "w", {"a": b"x"})
    os.mkfifo(folder / "pipe")
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "loop").symlink_to(".")
    copy_workspace(folder, tmp_path / "copy", LIMITS)
    assert shape(tmp_path / "copy") == {"a": b"x", "out": "/etc/passwd", "loop": "."}


def test_folders_without_permissions_are_copied_and_removed(tmp_path):
    folder = build(tmp_path / "w", {"locked/a": b"x"})
    (folder / "locked/a").chmod(0)
    (folder / "locked").chmod(0)
    copy_workspace(folder, tmp_path / "copy", LIMITS)
    assert (tmp_path / "copy/locked/a").read_bytes() == b"x"
    (folder / "locked").chmod(0)
    remove_tree(folder)
    assert not folder.exists()


def test_a_workspace_beyond_twice_its_limits_is_refused(tmp_path):
    files = build(tmp_path / "files", {f"f{i}": b"" for i in range(101)})
    with pytest.raises(SandboxError, match=r"limits\.files"):
        copy_workspace(files, tmp_path / "c1", LIMITS)
    large = build(tmp_path / "large", {"a": bytes(3 * 2**20)})
    with pytest.raises(SandboxError, match=r"limits\.disk_mb"):
        copy_workspace(large, tmp_path / "c2", LIMITS)
    deep = tmp_path / "deep"
    (deep / "/".join(["d"] * 210)).mkdir(parents=True)
    with pytest.raises(SandboxError, match="folders deep"):
        copy_workspace(deep, tmp_path / "c3", LimitsConfig())


def test_disk_usage_counts_blocks_and_stops_at_its_bound(tmp_path):
    folder = build(tmp_path / "w", {f"d/f{i}": b"x" * 5000 for i in range(20)})
    (folder / "link").symlink_to("/usr")
    usage = disk_usage(folder, max_files=100)
    assert usage.num_files == 22 and 20 * 8192 <= usage.num_bytes < 2**20 and usage.over(LimitsConfig()) == ""
    assert disk_usage(folder, max_files=5).num_files == 6
    assert "limits.files" in disk_usage(folder, max_files=5).over(LimitsConfig(files=5))
    assert "limits.disk_mb" in disk_usage(build(tmp_path / "big", {"a": b"x" * 2**21}), 10).over(LimitsConfig(disk_mb=1))


@pytest.mark.parametrize("crosses", [False, True])
def test_a_workspace_moves_also_to_another_file_system(tmp_path, monkeypatch, crosses):
    folder = build(tmp_path / "w", {"a/b": b"x"})
    os.mkfifo(folder / "pipe")
    (folder / "out").symlink_to("/etc/passwd")
    if crosses:

        def refuse(*_: object) -> None:
            raise OSError(errno.EXDEV, "another device")

        monkeypatch.setattr(os, "rename", refuse)
    move_tree(folder, tmp_path / "kept")
    assert not folder.exists() and (tmp_path / "kept/a/b").read_bytes() == b"x"
    assert (tmp_path / "kept/out").is_symlink() and (tmp_path / "kept/pipe").exists() != crosses
