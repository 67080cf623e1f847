"""Task folders in the Harbor / Terminal-Bench format: found, validated with file and line, loaded.

<task>/
  task.toml          [agent] timeout_sec, [verifier] timeout_sec and env, [environment] env; the rest is read or reported
  instruction.md     what the harness is told
  environment/       copied into the workspace (a Dockerfile is not built, and not copied)
  tests/test.sh      writes reward.txt or reward.json into the verifier log folder
  solution/          optional, never shown to a harness
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.task_toml import TomlReader

DEFAULT_TIMEOUT_S = 600.0
"""Harbor's default for both timeouts."""
MAX_INSTRUCTION_BYTES = 100_000
"""One argument of a Linux command may hold 128 KiB."""
NOT_COPIED = frozenset({"Dockerfile", ".dockerignore"})
"""What of `environment/` describes an image instead of being workspace content."""
SEARCH_DEPTH = 6
"""How far below the given folder task folders are looked for (as Harbor's readers do)."""


class Problem(msgspec.Struct, frozen=True, order=True):
    """One thing that is wrong with a task. `line` is 0 when the whole file or folder is meant."""

    file: str
    line: int
    severity: Literal["error", "warning"]
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.severity}: {self.message}"


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

    @property
    def environment(self) -> Path:
        return Path(self.folder, "environment")

    @property
    def tests(self) -> Path:
        return Path(self.folder, "tests")


def find_task_folders(root: Path) -> list[Path]:
    """Every folder at or below `root` that is, or was meant to be, a task; sorted by path.

    A folder with one of task.toml, task.yaml or instruction.md counts as meant to be one. Hidden folders are skipped.
    Raises ConfigError when `root` is not a folder or holds no task.
    """
    if not root.is_dir():
        what = "is a file; give the folder that it lies in" if root.is_file() else "does not exist"
        raise ConfigError(f"this folder of tasks {what}", file=str(root))
    found = sorted(_walk(root, SEARCH_DEPTH))
    if not found:
        raise ConfigError("no task in this folder: a task is a folder with task.toml and instruction.md", file=str(root))
    return found


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if any((folder / name).is_file() for name in ("task.toml", "task.yaml", "instruction.md")):
        yield folder
    elif depth > 0:
        for child in folder.iterdir():
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _walk(child, depth - 1)


def check_tasks(root: Path) -> tuple[list[Task], list[Problem]]:
    """Validate every task at or below `root`: the usable ones, and all problems of all of them in order of file."""
    tasks, problems, owners = [], [], {}
    for folder in find_task_folders(root):
        task, found = check_task(folder)
        problems += found
        if (other := owners.setdefault(folder.name, folder)) != folder:
            problems.append(
                Problem(str(folder), 0, "error", f"its name is taken by {other}: a task is known by its folder's name")
            )
        elif task is not None:
            tasks.append(task)
    return tasks, sorted(problems)


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
    problems: list[Problem] = []
    reader = _read_toml(folder, problems)
    instruction = _read_instruction(folder / "instruction.md", problems)
    _check_environment(folder / "environment", problems)
    _check_tests(folder / "tests", problems)
    if reader is None:
        return None, sorted(problems)
    task = Task(
        name=folder.name,
        folder=str(folder.resolve()),
        instruction=instruction,
        agent_timeout_s=reader.seconds("agent", "timeout_sec", DEFAULT_TIMEOUT_S),
        verifier_timeout_s=reader.seconds("verifier", "timeout_sec", DEFAULT_TIMEOUT_S),
        agent_env=reader.variables("environment", "env"),
        verifier_env=reader.variables("verifier", "env"),
        reward_range=reader.interval("metadata", "reward_range", (0.0, 1.0)),
    )
    reader.check_known_keys()
    reader.check_supported()
    problems += [Problem(str(folder / "task.toml"), *finding) for finding in reader.findings]
    failed = any(problem.severity == "error" for problem in problems)
    return None if failed else task, sorted(problems)


def _read_toml(folder: Path, problems: list[Problem]) -> TomlReader | None:
    path = folder / "task.toml"

    def fail(message: str, line: int = 0) -> None:
        problems.append(Problem(str(path), line, "error", message))

    if not path.is_file():
        old = (folder / "task.yaml").is_file()
        fail("missing" + ("; task.yaml is the first Terminal-Bench format: convert it to task.toml (Harbor)" if old else ""))
        return None
    try:
        text = path.read_text(encoding="utf-8")
        return TomlReader(text, tomllib.loads(text))
    except UnicodeDecodeError as error:
        fail(f"not UTF-8 at byte {error.start}")
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at line ")
        number = place.split(",")[0]
        fail(f"not TOML: {message}", int(number) if number.isdigit() else path.read_text().count("\n") + 1)
    return None


def _read_instruction(path: Path, problems: list[Problem]) -> str:
    def fail(message: str, line: int = 0) -> str:
        problems.append(Problem(str(path), line, "error", message))
        return ""

    if not path.is_file():
        return fail("missing: it holds what the harness is told")
    data = path.read_bytes()
    if len(data) > MAX_INSTRUCTION_BYTES:
        return fail(f"{len(data):,} bytes; at most {MAX_INSTRUCTION_BYTES:,} fit on a command line: move details to environment/")
    if b"\0" in data:
        return fail("holds a NUL byte", data[: data.index(b"\0")].count(b"\n") + 1)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return fail(f"not UTF-8 at byte {error.start}", data[: error.start].count(b"\n") + 1)
    return text if text.strip() else fail("empty: it holds what the harness is told")


def _check_environment(folder: Path, problems: list[Problem]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        problems.append(Problem(str(folder), 0, "error", "must be a folder: its files are copied into the workspace"))
        return
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            problems.append(Problem(str(folder / name), 0, "error", "tasks of several containers cannot run in this sandbox"))
    _check_dockerfile(folder / "Dockerfile", problems)
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            problems.append(
                Problem(str(path), 0, "error", "this link leads out of environment/, which the workspace does not see")
            )
        elif not (path.is_symlink() or path.is_file() or path.is_dir()):
            problems.append(Problem(str(path), 0, "error", "neither a file, a folder nor a link: it cannot be copied"))


def _check_dockerfile(path: Path, problems: list[Problem]) -> None:
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    run = [number for number, line in enumerate(lines, 1) if line.lstrip().upper().startswith("RUN ")]
    if run:
        message = "not built: what its RUN lines install must be on this machine (in /usr, or listed in harness.readable)"
        problems.append(Problem(str(path), run[0], "warning", message))


def _check_tests(folder: Path, problems: list[Problem]) -> None:
    script = folder / "test.sh"
    if not script.is_file():
        problems.append(
            Problem(str(script), 0, "error", "missing: it writes reward.txt or reward.json into the verifier log folder")
        )
        return
    if not script.read_bytes().strip():
        problems.append(
            Problem(str(script), 0, "error", "empty: it writes reward.txt or reward.json into the verifier log folder")
        )
        return
    files = (path for path in folder.rglob("*") if path.is_file())
    if not any(b"reward" in path.read_bytes() for path in files):
        message = "no file of tests/ mentions a reward file: write reward.txt or reward.json into ${VERIFIER_DIR:-/logs/verifier}"
        problems.append(Problem(str(script), 0, "warning", message))
