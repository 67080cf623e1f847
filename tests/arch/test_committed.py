"""What is committed works on any machine: no path of one, no host of a package registry, no data that nobody reads."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source import ROOT, expect_none

TEXT_SUFFIXES = frozenset(
    {".py", ".md", ".toml", ".txt", ".sh", ".json", ".jsonl", ".yml", ".yaml", ".cfg", ".html", ".cpp", ".c", ".jinja", ""}
)
MAX_FILE_BYTES = 2_000_000
MADE_FOLDERS = frozenset({"__pycache__", "runs", "node_modules", "build", "dist"})


def committed() -> list[str]:
    """What git knows of; in sources without git, or of another owner, all that is not in a hidden or a made folder."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    names = done.stdout.splitlines() if done.returncode == 0 else list(unpacked())
    return [name for name in names if (ROOT / name).is_file()]


def unpacked() -> Iterator[str]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in MADE_FOLDERS]
        yield from (str((Path(folder) / name).relative_to(ROOT)) for name in names if not name.endswith(".pyc"))


FILES = committed()


def lines_matching(pattern: str) -> list[str]:
    compiled = re.compile(pattern)
    found = []
    for name in FILES:
        if (ROOT / name).suffix in TEXT_SUFFIXES:
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            if compiled.search(text):
                found += [
                    f"{name}:{number}: {line.strip()[:120]}"
                    for number, line in enumerate(text.splitlines(), 1)
                    if compiled.search(line)
                ]
    return found


def test_there_are_files():
    assert "pyproject.toml" in FILES


@pytest.mark.parametrize("folder", ["work", "root", "home/[a-z]+"])
def test_no_path_of_a_machine_is_committed(folder: str):
    expect_none(lines_matching(rf"""(?m)(^|[\s"'`(=:])/{folder}/"""))


def test_no_host_of_a_package_registry_is_named():
    hosts = (
        "py" + "pi.org",
        "python" + "hosted",
        "registry.npm" + "js",
        "crates" + ".io",
        "download.py" + "torch",
        "proxy.go" + "lang",
        "conda." + "anaconda",
    )
    expect_none(lines_matching("|".join(re.escape(host) for host in hosts)))


def test_no_large_file_is_committed():
    expect_none([name for name in FILES if (ROOT / name).stat().st_size > MAX_FILE_BYTES])


def test_no_page_that_a_command_wrote_is_committed():
    assert [name for name in FILES if name.endswith(".html") and "/" not in name] == []


def test_runs_and_caches_are_not_committed():
    assert [
        name for name in FILES if name.startswith(("runs/", ".cache/")) or "__pycache__" in name or name.endswith(".safetensors")
    ] == []
