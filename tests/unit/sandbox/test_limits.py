"""Cgroups on a made-up file system, resource limits, what the shell prelude sets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from qwengyre.sandbox.config import LimitsConfig
from qwengyre.sandbox.limits import CGROUP_PREFIX, Cgroup, find_cgroup_parent, resource_limits, shell_prelude

LIMITS = LimitsConfig(memory_mb=64, processes=7, disk_mb=3, open_files=99)


def test_version_2_uses_one_folder_below_the_own_group(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "user.slice/me").mkdir(parents=True)
    parent = find_cgroup_parent("q-1", tmp_path, "0::/user.slice/me\n")
    assert parent is not None and set(parent.folders.values()) == {tmp_path / "user.slice/me/q-1"}
    assert (tmp_path / "user.slice/me/q-1/cgroup.subtree_control").read_text() == "+memory +pids"
    parent.create("e1", LIMITS)
    assert (tmp_path / "user.slice/me/q-1/e1/memory.max").read_text() == str(64 * 2**20)
    assert (tmp_path / "user.slice/me/q-1/e1/pids.max").read_text() == "7"


def test_version_1_uses_one_folder_for_each_controller(tmp_path):
    for path in ("memory/box", "pids"):
        (tmp_path / path).mkdir(parents=True)
    own = "8:pids:/\n4:memory:/box\n3:cpu,cpuacct:/x\n"
    parent = find_cgroup_parent("q-1", tmp_path, own)
    assert parent is not None
    cgroup = parent.create("e1", LIMITS)
    assert (tmp_path / "memory/box/q-1/e1/memory.limit_in_bytes").read_text() == str(64 * 2**20)
    assert (tmp_path / "pids/q-1/e1/pids.max").read_text() == "7"
    assert set(cgroup.folders) == {tmp_path / "memory/box/q-1/e1", tmp_path / "pids/q-1/e1"}


def test_processors_are_limited_and_weighed_where_they_can_be(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for path in ("memory", "pids", "cpu/box"):
        (one / path).mkdir(parents=True)
    parent = find_cgroup_parent("q-1", one, "8:pids:/\n4:memory:/\n3:cpu,cpuacct:/box\n")
    assert parent is not None
    parent.create("e1", LimitsConfig(cpus=1.5))
    assert (one / "cpu/box/q-1/e1/cpu.cfs_quota_us").read_text() == "150000"
    (one / "cpu/box/q-1/cpu.shares").write_text("1024")
    parent.weigh()
    assert (one / "cpu/box/q-1/cpu.shares").read_text() == str(1024 * (os.cpu_count() or 1))
    two.mkdir()
    (two / "cgroup.controllers").write_text("cpuset cpu io memory pids")
    (two / "cgroup.procs").write_text("")
    parent = find_cgroup_parent("q-1", two, "0::/\n")
    assert parent is not None
    parent.create("e1", LimitsConfig(cpus=0.5))
    assert (two / "q-1/e1/cpu.max").read_text() == "50000 100000"
    assert set((two / "cgroup.subtree_control").read_text().split()) == {"+memory", "+pids", "+cpu"}


def test_a_sandbox_does_not_swap(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "cgroup.procs").write_text("")
    parent = find_cgroup_parent("q-1", tmp_path, "0::/\n")
    (tmp_path / "q-1/e1").mkdir()
    (tmp_path / "q-1/e1/memory.swap.max").write_text("max")
    parent.create("e1", LIMITS)
    assert (tmp_path / "q-1/e1/memory.swap.max").read_text() == "0"


def test_no_cgroup_where_none_may_be_made(tmp_path):
    assert find_cgroup_parent("q-1", tmp_path, "0::/\n") is None
    (tmp_path / "cgroup.controllers").write_text("")
    assert find_cgroup_parent("q-1", tmp_path / "nowhere", "0::/\n") is None


def test_cgroups_of_killed_launchers_are_removed(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / f"{CGROUP_PREFIX}999999999-a/e1").mkdir(parents=True)
    (tmp_path / f"{CGROUP_PREFIX}1-a/e1").mkdir(parents=True)
    assert find_cgroup_parent("q-1", tmp_path, "0::/\n") is not None
    assert not (tmp_path / f"{CGROUP_PREFIX}999999999-a").exists()
    assert (tmp_path / f"{CGROUP_PREFIX}1-a/e1").exists()


@pytest.mark.parametrize(
    ("name", "text"), [("memory.events", "low 0\noom 3\noom_kill 2\n"), ("memory.oom_control", "under_oom 0\noom_kill 2\n")]
)
def test_kills_for_memory_are_counted(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert Cgroup((tmp_path,)).memory_kills() == 2 and Cgroup().memory_kills() == 0


def test_a_cgroup_in_use_is_not_removed(tmp_path):
    (tmp_path / "e1/still").mkdir(parents=True)
    assert not Cgroup((tmp_path / "e1",)).remove()
    (tmp_path / "e1/still").rmdir()
    assert Cgroup((tmp_path / "e1",)).remove() and Cgroup((tmp_path / "e1",)).remove()


def test_memory_is_limited_for_each_process_without_a_cgroup():
    assert "RLIMIT_DATA" not in resource_limits(LIMITS, has_cgroup=True)
    assert resource_limits(LIMITS, has_cgroup=False)["RLIMIT_DATA"] == 64 * 2**20


def test_the_shell_prelude_sets_the_limits(tmp_path: Path):
    prelude = shell_prelude(resource_limits(LIMITS, has_cgroup=False), [])
    script = f"{prelude} && ulimit -f && ulimit -n && ulimit -d && ulimit -c"
    out = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert out == [str(3 * 1024), "99", str(64 * 1024), "0"]
