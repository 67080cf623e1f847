"""Get task folders: from a git address, a folder, or by name from an index as Harbor's registry has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.suites.folders import safe_name

GIT_TIMEOUT_S: Final = 1800.0  # a large repository over a slow line
ADDRESS: Final = re.compile(r"(?:https?|ssh|git|file)://\S+|[\w.-]+@[\w.-]+:\S+")
COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
NEEDS_INDEX: Final = (
    "neither a folder nor a git address; to look it up by name, give --index FILE: a JSON list of {name, version, tasks: [{name, git_url, "
    "git_commit_id, path}]}, as registry.json of Harbor is"
)


class IndexedTask(msgspec.Struct, frozen=True):
    """A task in an index."""

    name: str
    git_url: str
    path: str
    git_commit_id: str | None = None


class IndexedSuite(msgspec.Struct, frozen=True):
    """A suite in an index; what else it says is passed over."""

    name: str
    tasks: tuple[IndexedTask, ...]
    version: str = ""


def pull(source: str, target: Path, index: Path | None = None) -> int:
    """Bring the tasks of `source` into `target`, which must not exist; return how many folders came. Raises ConfigError.

    `source` is a folder, a git address (`ADDRESS#COMMIT`), or NAME or NAME@VERSION in `index`.
    """
    if target.exists():
        raise ConfigError("already exists: give another folder", file=str(target))
    temporary = target.with_name(f".{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        if ADDRESS.fullmatch(source):
            address, _, commit = source.partition("#")
            with _cloned(address, commit or None) as clone:
                shutil.copytree(clone, temporary, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        elif os.path.isdir(source):
            shutil.copytree(source, temporary, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        else:
            _copy_tasks(_found(source, index).tasks, temporary)
        number = sum(1 for path in temporary.rglob("task.toml") if path.is_file())
        if not number:
            raise ConfigError("no folder with a task.toml in it: `qwengyre tasks import` reads other formats", file=source)
        temporary.rename(target)
        return number
    except OSError as error:
        raise ConfigError(f"cannot be copied: {error.strerror or error}", file=source) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _found(source: str, index: Path | None) -> IndexedSuite:
    if index is None:
        raise ConfigError(NEEDS_INDEX, file=source)
    try:
        suites = msgspec.json.decode(index.read_bytes(), type=list[IndexedSuite])
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(index)) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"not an index of suites: {error}", file=str(index)) from None
    name, _, version = source.partition("@")
    known = [suite for suite in suites if suite.name == name]
    matching = [suite for suite in known if not version or suite.version == version]
    if len(matching) != 1:
        there = ", ".join(f"{one.name}@{one.version}" for one in (known or suites)[:20]) or "no suites"
        raise ConfigError(f"{len(matching)} suites are called {source}; there are {there}", file=str(index))
    return matching[0]


def _copy_tasks(tasks: Iterable[IndexedTask], target: Path) -> None:
    """Each repository is cloned once for each commit that is wanted of it."""
    sources: dict[tuple[str, str | None], list[IndexedTask]] = {}
    for task in tasks:
        sources.setdefault((task.git_url, task.git_commit_id), []).append(task)
    for (address, commit), wanted in sources.items():
        with _cloned(address, commit) as clone:
            for task in wanted:
                folder = (clone / task.path).resolve()
                if not folder.is_relative_to(clone.resolve()) or not folder.is_dir():
                    raise ConfigError(f"{task.path} is not a folder of it", file=address)
                shutil.copytree(folder, target / safe_name(task.name.rpartition("/")[2]), symlinks=True)


@contextmanager
def _cloned(address: str, commit: str | None) -> Iterator[Path]:
    """A checkout, gone at the end. No program of the repository is run, and nothing is asked. Raises ConfigError."""
    if address.startswith("-") or (commit is not None and not COMMIT.fullmatch(commit)):
        raise ConfigError(f"{commit!r} is not a commit", file=address)
    if shutil.which("git") is None:
        raise ConfigError("needs git, which is not installed", file=address)
    with tempfile.TemporaryDirectory(prefix="qwengyre-pull-") as folder:
        clone = Path(folder, "clone")
        _git(["clone", "--quiet", *([] if commit else ["--depth=1"]), "--", address, str(clone)], address)
        if commit:
            _git(["-C", str(clone), "checkout", "--quiet", commit], address)
        yield clone


def _git(arguments: list[str], address: str) -> None:
    variables = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never", *arguments]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"git took more than {GIT_TIMEOUT_S:g} s", file=address) from None
    if done.returncode:
        raise ConfigError(f"git cannot get it: {done.stderr.strip()[-500:]}", file=address)
