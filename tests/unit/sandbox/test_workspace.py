"""Workspaces: copied as they are, digested by content, hostile ones bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.core.errors import SandboxError, WorkspaceRefused
from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.limits import disk_usage
from qwengyre.sandbox.links import LinkRule
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.workspace import copy_workspace, keep_copy, move_tree, prepare_workspace, remove_tree

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


def test_special_files_and_links_that_leave_are_left_out(tmp_path):
    folder = build(tmp_path / "w", {"a": b"x", "d/b": b"y"})
    os.mkfifo(folder / "pipe")
    for name, target in {
        "out": "/etc/passwd",
        "up": "..",
        "loop": ".",
        "self": "self",
        "d/back": "../a",
        "d/far": "../../x",
    }.items():
        (folder / name).symlink_to(target)
    copy_workspace(folder, tmp_path / "copy", LIMITS)
    kept = {"a": b"x", "d": None, "d/b": b"y", "d/back": "../a", "loop": ".", "self": "self"}
    assert shape(tmp_path / "copy") == kept
    (folder / "own").symlink_to("/workspace/a")
    (folder / "python").symlink_to("/usr/bin/python3")
    copy_workspace(folder, tmp_path / "again", LIMITS, LinkRule(roots=("/workspace",), visible=("/usr",)))
    assert shape(tmp_path / "again") == kept | {"own": "/workspace/a", "python": "/usr/bin/python3"}


def test_a_link_that_leaves_is_not_part_of_the_scored_state(tmp_path):
    plain, linked = (build(tmp_path / name, {"a": b"x"}) for name in ("plain", "linked"))
    (linked / "answer.txt").symlink_to("/tests/expected.txt")
    assert copy_workspace(plain, tmp_path / "c1", LIMITS) == copy_workspace(linked, tmp_path / "c2", LIMITS)


def test_files_of_several_names_stay_so_and_cost_their_contents_once(tmp_path):
    folder = build(tmp_path / "w", {"a": b"x" * 2**20, "d/e": None})
    for n in range(40):
        os.link(folder / "a", folder / f"d/name{n}")
    copy_workspace(folder, tmp_path / "copy", LIMITS)
    assert shape(tmp_path / "copy") == shape(folder)
    assert (tmp_path / "copy/a").stat().st_nlink == 41 and list(tmp_path.glob("copy.*")) == []
    apart = build(tmp_path / "apart", {"a": b"xy", "b": b"xy"})
    named = build(tmp_path / "named", {"a": b"xy"})
    os.link(named / "a", named / "b")
    assert copy_workspace(apart, tmp_path / "c1", LIMITS) == copy_workspace(named, tmp_path / "c2", LIMITS)


def test_holes_are_neither_read_nor_written_and_alike_to_zeros(tmp_path):
    folder = build(tmp_path / "w", {})
    for name in ("huge", "data"):
        with open(folder / name, "wb") as file:
            file.truncate(2**42 if name == "huge" else 300_000)
            file.seek(100_001)
            file.write(b"in the middle")
    copy_workspace(folder, tmp_path / "copy", LIMITS)
    assert (tmp_path / "copy/data").read_bytes() == (folder / "data").read_bytes()
    assert (tmp_path / "copy/huge").stat().st_size == 2**42 and (tmp_path / "copy/huge").stat().st_blocks * 512 < 2**20
    (folder / "huge").unlink()
    written = build(tmp_path / "written", {"data": (folder / "data").read_bytes()})
    assert copy_workspace(folder, tmp_path / "c1", LIMITS) == copy_workspace(written, tmp_path / "c2", LIMITS)


@pytest.mark.parametrize("depth", [300, 1500])
def test_a_workspace_of_any_depth_is_copied(tmp_path, depth):
    os.mkdir(tmp_path / "w")
    at = os.open(tmp_path / "w", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("nnnnnnnn", dir_fd=at)
        at, outer = os.open("nnnnnnnn", os.O_RDONLY, dir_fd=at), at
        os.close(outer)
    os.close(os.open("leaf", os.O_CREAT, dir_fd=at))
    os.close(at)
    limits = LimitsConfig(files=2000)
    first = copy_workspace(tmp_path / "w", tmp_path / "copy", limits)
    assert copy_workspace(tmp_path / "copy", tmp_path / "again", limits) == first
    for name in ("w", "copy", "again"):
        remove_tree(tmp_path / name)


def test_names_that_are_no_text_are_copied(tmp_path):
    tree = {os.fsdecode(b"\xff\xfe"): b"1", "new\nline": b"2", "\x1b[2J": b"3", "-rf": b"4"}
    copy_workspace(build(tmp_path / "w", tree), tmp_path / "copy", LIMITS)
    assert shape(tmp_path / "copy") == shape(tmp_path / "w")


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
    with pytest.raises(WorkspaceRefused, match=r"limits\.files"):
        copy_workspace(files, tmp_path / "c1", LIMITS)
    large = build(tmp_path / "large", {"a": bytes(3 * 2**20)})
    with pytest.raises(WorkspaceRefused, match=r"limits\.disk_mb"):
        copy_workspace(large, tmp_path / "c2", LIMITS)
    links = build(tmp_path / "links", {})
    for n in range(101):
        (links / f"l{n}").symlink_to(".")
    with pytest.raises(WorkspaceRefused):
        copy_workspace(links, tmp_path / "c3", LIMITS)


def test_an_environment_over_the_limits_of_a_workspace_is_refused(tmp_path):
    build(tmp_path / "t", {"environment/a": bytes(2**21)})
    task = Task("t", str(tmp_path / "t"), "x", 1.0, 1.0)
    with pytest.raises(SandboxError, match=r"environment is over the limits of a workspace: raise limits\.disk_mb"):
        prepare_workspace(task, tmp_path / "w", LIMITS)
    prepare_workspace(task, tmp_path / "w2", LimitsConfig(disk_mb=3))


def test_an_environment_that_became_a_link_is_not_followed(tmp_path):
    """Between the check of the task and its use."""
    build(tmp_path / "home", {"id_ed25519": b"secret"})
    (tmp_path / "t").mkdir()
    (tmp_path / "t/environment").symlink_to("../home")
    with pytest.raises(OSError, match="environment"):
        prepare_workspace(Task("t", str(tmp_path / "t"), "x", 1.0, 1.0), tmp_path / "w")
    assert not any((tmp_path / "w").rglob("*"))


def test_a_copy_for_people_has_no_powers_and_no_special_files(tmp_path):
    folder = build(tmp_path / "a", {"su": b"x", "deep/er/f": b"y"})
    os.chmod(folder / "su", 0o6755)
    os.chmod(folder / "deep", 0o2777)
    os.mkfifo(folder / "pipe")
    os.symlink("/etc/shadow", folder / "link")
    keep_copy(folder, tmp_path / "b")
    copied = sorted(str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*"))
    assert copied == ["deep", "deep/er", "deep/er/f", "link", "su"] and os.readlink(tmp_path / "b/link") == "/etc/shadow"
    for path in [tmp_path / "b", *(tmp_path / "b" / name for name in copied if name != "link")]:
        assert path.stat().st_mode & 0o7077 == 0


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


@pytest.mark.parametrize("crosses", [False, True])
def test_what_is_kept_has_no_setuid_bit(tmp_path, monkeypatch, crosses):
    folder = build(tmp_path / "w", {"bin/root": b"x"})
    (folder / "bin/root").chmod(0o6755)
    if crosses:
        monkeypatch.setattr(os, "rename", _refuse)
    move_tree(folder, tmp_path / "kept")
    assert (tmp_path / "kept/bin/root").stat().st_mode & 0o7077 == 0 and os.access(tmp_path / "kept/bin/root", os.X_OK)


def _refuse(*_: object) -> None:
    raise OSError(errno.EXDEV, "another device")
