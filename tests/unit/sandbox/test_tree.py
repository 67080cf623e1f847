"""Folders that others filled: walked, measured and removed, however deep, wide or locked they are."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from qwengyre.sandbox.tree import FolderMoved, Kind, listing, measure, open_folder, remove_tree, take_powers, walk

DEEP = 1500
"""Past the interpreter's stack."""


def nest(folder: Path, depth: int, name: str = "d") -> None:
    """Folders in folders, past the longest path that the kernel takes; `leaf` in the last one."""
    folder.mkdir()
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        inner = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


def visits(folder: Path) -> list[tuple[Kind, str]]:
    root = open_folder(folder)
    try:
        return [(visit.kind, visit.name) for visit in walk(root, lambda inner: sorted(listing(inner)))]
    finally:
        os.close(root)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_walk_meets_everything_once_and_folders_before_and_after_their_contents(tmp_path):
    for name in ("a/x", "a/y", "b/c/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a")
    before = open_descriptors()
    assert [f"{kind.value} {name}" for kind, name in visits(tmp_path)] == [
        *("folder a", "entry x", "entry y", "left a", "folder b", "folder c", "entry z", "left c", "left b", "entry link"),
    ]
    assert open_descriptors() == before


@pytest.mark.parametrize("name", ["d", "n" * 255])
def test_no_depth_and_no_length_of_path_ends_a_walk_or_a_removal(tmp_path, name):
    nest(tmp_path / "w", DEEP, name)
    assert len(visits(tmp_path / "w")) == 2 * DEEP + 1
    assert measure(tmp_path / "w", 10_000).num_entries == DEEP + 1
    take_powers(tmp_path / "w")
    before = open_descriptors()
    remove_tree(tmp_path / "w")
    assert not (tmp_path / "w").exists() and open_descriptors() == before


def test_a_folder_that_was_moved_away_is_not_left_by_its_new_place(tmp_path):
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/b/file").touch()
    (tmp_path / "root/z").touch()
    (tmp_path / "outside").mkdir()
    root = open_folder(tmp_path / "root")
    seen = []
    with pytest.raises(FolderMoved):
        for visit in walk(root):
            seen.append(visit.name)
            if visit.name == "file":
                os.rename(tmp_path / "root/a/b", tmp_path / "outside/b")
    assert "outside" not in seen
    os.close(root)


@pytest.mark.parametrize("swap", ["gone", "link", "file"])
def test_a_folder_that_another_thing_replaced_is_empty(tmp_path, swap):
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").touch()
    root = open_folder(tmp_path / "root")
    seen = []
    for visit in walk(root):
        seen.append((visit.kind, visit.name))
        if visit.kind is Kind.FOLDER:
            (tmp_path / "root/a").rmdir()
            if swap == "link":
                (tmp_path / "root/a").symlink_to(tmp_path / "secret")
            elif swap == "file":
                (tmp_path / "root/a").touch()
    os.close(root)
    assert seen == [(Kind.FOLDER, "a"), (Kind.LEFT, "a")]


def test_everything_that_a_harness_can_make_is_removed(tmp_path):
    folder = tmp_path / "w"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(folder / "socket"))
    for name in ("with\nnewline", "\x1b[2J", os.fsdecode(b"\xff\xfe"), "-rf", " "):
        (folder / name).mkdir()
        (folder / name / name).touch()
    (folder / "loop").symlink_to("loop")
    (folder / "up").symlink_to("..")
    (folder / "locked").mkdir()
    (folder / "locked/inner").mkdir()
    (folder / "locked/inner/file").touch()
    for name in ("locked/inner/file", "locked/inner", "locked"):
        (folder / name).chmod(0)
    folder.chmod(0o500)
    remove_tree(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_removed_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "w").symlink_to("kept")
    remove_tree(tmp_path / "w")
    assert not (tmp_path / "w").is_symlink() and (tmp_path / "kept/file").exists()
    remove_tree(tmp_path / "nowhere")


def test_nothing_that_is_kept_has_power_or_is_others_to_read(tmp_path):
    folder = tmp_path / "w"
    (folder / "deep").mkdir(parents=True)
    for name, mode in (("suid", 0o4755), ("sgid", 0o2777), ("deep/both", 0o6711), ("deep/unreadable", 0o4000)):
        (folder / name).touch()
        (folder / name).chmod(mode)
    (folder / "deep").chmod(0o3777)
    (tmp_path / "outside").touch(mode=0o644)
    (tmp_path / "outside").chmod(0o4755)
    (folder / "link").symlink_to("../outside")
    take_powers(folder)
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*") if not path.is_symlink()}
    assert modes == {"suid": 0o700, "sgid": 0o700, "deep": 0o700, "both": 0o700, "unreadable": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (tmp_path / "outside").stat().st_mode & 0o4000


def test_a_file_of_many_names_is_measured_once_and_holes_not_at_all(tmp_path):
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "file").write_bytes(b"x" * 2**20)
    for n in range(20):
        os.link(folder / "file", folder / f"name{n}")
    with open(folder / "sparse", "wb") as file:
        file.truncate(2**40)
    found = measure(folder, 100)
    assert 2**20 <= found.num_bytes < 2 * 2**20 and found.num_entries == 22
    assert measure(folder, 5).num_entries == 6
    assert measure(tmp_path / "nowhere", 5).num_entries == 0
