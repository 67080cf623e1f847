"""Task folders in the Harbor / Terminal-Bench format: found, validated with file and line, loaded.

<task>/
  task.toml          [agent] timeout_sec, [verifier] timeout_sec and env, [environment] env; the rest is read or reported
  instruction.md     what the harness is told
  environment/       a Dockerfile that is built, and what it copies; without one, what is copied into the workspace
  tests/test.sh      writes reward.txt or reward.json into the verifier log folder
  solution/          optional, never shown to a harness
"""

from __future__ import annotations

import os
import tomllib
import unicodedata
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.images.image import Image
from qwengyre.images.wanted import WantedImage
from qwengyre.sandbox.task_definition import read_wanted_image
from qwengyre.sandbox.task_files import (
    MAX_TEXT_BYTES,
    FolderSize,
    Problem,
    Problems,
    Unreadable,
    check_environment,
    check_tests,
    read_file,
    read_instruction,
)
from qwengyre.sandbox.task_toml import LONG_KEY, TomlReader

DEFAULT_TIMEOUT_S: Final = 600.0
"""Harbor's default for both timeouts."""
NOT_COPIED: Final = frozenset({"Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml"})
"""What of `environment/` describes an image instead of being workspace content."""
SEARCH_DEPTH: Final = 6
"""How far below the given folder task folders are looked for (as Harbor's readers do)."""
MAX_SEARCHED: Final = 200_000
"""Folders that are looked at for tasks: whoever names a home folder by mistake hears of it within a minute."""
MARKS: Final = ("task.toml", "task.yaml", "instruction.md")
"""A folder with one of these counts as meant to be a task."""


class Task(msgspec.Struct, frozen=True):
    """A task folder that passed every check."""

    name: str
    folder: str
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    agent_env: dict[str, str] = {}
    """`[environment] env`: given to the harness and to the evaluator."""
    verifier_env: dict[str, str] = {}
    reward_range: tuple[float, float] = (0.0, 1.0)
    """`[metadata] reward_range`: scores outside are evaluator failures."""
    wanted_image: WantedImage | None = None
    """What it is to run on, if not on the programs of this machine."""
    image: Image | None = None
    """The same, once it is here (`task_images.py`)."""
    has_separate_verifier: bool = False
    """Its verifier has an environment of its own, by Harbor's rules: `[verifier] environment_mode`, else whether there is a
    `[verifier.environment]`. Sandboxes of our own score in a fresh place either way."""
    environment_bytes: int = 0
    """Of the files that are copied into a workspace."""
    environment_files: int = 0

    @property
    def environment(self) -> Path:
        return Path(self.folder, "environment")

    @property
    def tests(self) -> Path:
        return Path(self.folder, "tests")


def find_task_folders(root: Path) -> list[Path]:
    """Every folder at or below `root` that is, or was meant to be, a task; sorted by path. Hidden folders are skipped, links named.

    Raises ConfigError when `root` is not a folder or holds no task.
    """
    return _search(root, Problems())


def _search(root: Path, problems: Problems) -> list[Path]:
    if not root.is_dir():
        what = "is a file; give the folder that it lies in" if root.is_file() else "does not exist"
        raise ConfigError(f"this folder of tasks {what}", file=str(root))
    found: list[Path] = []
    pending, num_searched = [(root, SEARCH_DEPTH)], 0
    while pending:
        folder, depth = pending.pop()
        num_searched += 1
        if num_searched > MAX_SEARCHED:
            raise ConfigError(f"more than {MAX_SEARCHED:,} folders: give the folder of the tasks themselves", file=str(root))
        if _is_meant_as_task(folder):
            found.append(folder)
        elif depth > 0:
            pending += [(child, depth - 1) for child in _children(folder, problems)]
    if not found and not problems.found:
        raise ConfigError("no task in this folder: a task is a folder with task.toml and instruction.md", file=str(root))
    return sorted(found)


def _is_meant_as_task(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in MARKS)


def _children(folder: Path, problems: Problems) -> list[Path]:
    """Folders to search; a link to a folder is named instead."""
    children = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    children.append(Path(entry.path))
                elif entry.is_symlink() and os.path.isdir(entry.path):
                    _name_link(Path(entry.path), problems)
    except OSError as error:
        problems.error(folder, f"cannot be read: {error.strerror}")
    return children


def _name_link(path: Path, problems: Problems) -> None:
    if _is_meant_as_task(path):
        problems.error(path, "a link to a task, which is not followed: copy the task here, or name the folder that it lies in")
    else:
        problems.warning(path, "a link to a folder, which is not searched for tasks")


def check_tasks(root: Path) -> tuple[list[Task], list[Problem]]:
    """Validate every task at or below `root`: the usable ones, and all problems of all of them in order of file."""
    tasks: list[Task] = []
    owners: dict[str, Path] = {}
    problems = Problems()
    for folder in _search(root, problems):
        task, found = check_task(folder)
        problems.found += found
        if (other := owners.setdefault(folder.name, folder)) != folder:
            problems.error(folder, f"its name is taken by {other}: a task is known by its folder's name")
        elif task is not None:
            tasks.append(task)
    return tasks, sorted(problems.found)


def load_tasks(root: Path) -> list[Task]:
    """Load every task at or below `root`. Raises ConfigError with the first error when any task has one."""
    tasks, problems = check_tasks(root)
    _raise_first(root, problems)
    return tasks


def load_task(folder: Path) -> Task:
    """Load one task folder. Raises ConfigError with the first error."""
    task, problems = check_task(folder)
    _raise_first(folder, problems)
    assert task is not None, "a task without errors loads"
    return task


def _raise_first(root: Path, problems: list[Problem]) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        first, rest = errors[0], len(errors) - 1
        more = f" (and {rest} more: qwengyre tasks check {root})" if rest else ""
        raise ConfigError(first.message + more, file=first.file, line=first.line or None)


def check_task(folder: Path) -> tuple[Task | None, list[Problem]]:
    """Validate one task folder: the task when it has no error, and every problem found."""
    problems = Problems()
    _check_name(folder, problems)
    reader = _read_toml(folder, problems)
    instruction = read_instruction(folder / "instruction.md", problems)
    size = check_environment(folder / "environment", problems)
    check_tests(folder / "tests", problems)
    task = _read_task(folder, reader, instruction, size) if reader is not None else None
    wanted = read_wanted_image(folder, reader.image_settings() if reader is not None else {}, problems)
    if task is not None:
        task = msgspec.structs.replace(task, wanted_image=wanted)
    if reader is not None:
        problems.found += [Problem(str(folder / "task.toml"), *finding) for finding in reader.findings]
    failed = any(problem.severity == "error" for problem in problems.found)
    return None if failed else task, sorted(problems.found)


def _read_task(folder: Path, reader: TomlReader, instruction: str, size: FolderSize) -> Task:
    task = Task(
        name=folder.name,
        folder=str(folder.resolve()),
        instruction=instruction,
        agent_timeout_s=reader.seconds("agent", "timeout_sec", DEFAULT_TIMEOUT_S),
        verifier_timeout_s=reader.seconds("verifier", "timeout_sec", DEFAULT_TIMEOUT_S),
        agent_env=reader.variables("environment", "env"),
        verifier_env=reader.variables("verifier", "env"),
        reward_range=reader.interval("metadata", "reward_range", (0.0, 1.0)),
        has_separate_verifier=reader.has_separate_verifier(),
        environment_bytes=size.num_bytes,
        environment_files=size.num_entries,
    )
    reader.check_known_keys()
    reader.check_supported()
    return task


def _check_name(folder: Path, problems: Problems) -> None:
    """A task's name stands in journals and reports, and in lines of a terminal."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in folder.name):
        problems.error(folder, "the name of a task must be UTF-8 without control characters")


def _read_toml(folder: Path, problems: Problems) -> TomlReader | None:
    path = folder / "task.toml"
    try:
        text = read_file(path, MAX_TEXT_BYTES).decode("utf-8-sig")
        if long_key := LONG_KEY.search(text):
            problems.error(path, "a key of more than 50 parts", text.count("\n", 0, long_key.start()) + 1)
            return None
        return TomlReader(text, tomllib.loads(text))
    except FileNotFoundError:
        old = os.path.lexists(folder / "task.yaml")
        hint = "; task.yaml is the first Terminal-Bench format: convert it to task.toml (Harbor)" if old else ""
        problems.error(path, f"missing{hint}")
    except Unreadable as error:
        problems.error(path, str(error))
    except UnicodeDecodeError as error:
        problems.error(path, f"not UTF-8 at byte {error.start}")
    except RecursionError:
        problems.error(path, "not TOML: nested too deeply")
    except ValueError as error:  # TOMLDecodeError, and a number with more digits than Python reads
        message, _, place = str(error).partition(" (at line ")
        number = place.split(",")[0]
        problems.error(path, f"not TOML: {message}", int(number) if number.isdigit() else text.count("\n") + 1)
    return None
