"""Task folders as they are written: whole or not at all, under names that are safe whatever a row calls itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ConfigError

MAX_NAME_CHARS: Final = 120
JUDGE_HEAD: Final = """\
#!/bin/bash
# What was left running is ended before it is judged: in a sandbox this shell is process 1.
bash "$TESTS_DIR/run.sh" > "${TMPDIR:-/tmp}/test-output.txt" 2>&1 < /dev/null
code=$?
[ $$ = 1 ] && kill -9 -1
tail -c 20000 "${TMPDIR:-/tmp}/test-output.txt"
"""


class ImportedTask(msgspec.Struct, frozen=True):
    """One task to be written."""

    name: str
    instruction: str
    files: dict[str, str]
    """Path below the task's folder -> text. `tests/test.sh` is one of them."""
    image: str = ""
    timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    copied: tuple[tuple[str, str], ...] = ()
    """(path on this machine, path below the task's folder) of files and folders."""
    warnings: tuple[str, ...] = ()


def write_tasks(tasks: Iterable[ImportedTask], target: Path) -> Iterator[ImportedTask]:
    """Write each task below `target` and yield it. Raises ConfigError for a name that is taken, and OSError."""
    for task in tasks:
        folder = target / safe_name(task.name)
        if folder.exists():
            raise ConfigError(f"{task.name} already exists: give another folder, or remove it", file=str(folder))
        temporary = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            _write(task, temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        yield task


def _write(task: ImportedTask, folder: Path) -> None:
    for source, name in task.copied:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if Path(source).is_dir():
            shutil.copytree(source, folder / name, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, folder / name, follow_symlinks=False)
    files = {"task.toml": _toml(task), "instruction.md": task.instruction.rstrip() + "\n", **task.files}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _toml(task: ImportedTask) -> str:
    lines = ['version = "1.0"', "", "[metadata]", f"imported_as = {json.dumps(task.name)}"]
    if task.timeout_s:
        lines += ["", "[agent]", f"timeout_sec = {float(task.timeout_s)}"]
    if task.verifier_timeout_s:
        lines += ["", "[verifier]", f"timeout_sec = {float(task.verifier_timeout_s)}"]
    if task.image:
        lines += ["", "[environment]", f"docker_image = {json.dumps(task.image)}"]
    return "\n".join(lines) + "\n"


def safe_name(name: str) -> str:
    """
    >>> safe_name("astropy__astropy-1"), safe_name("../a b/c")
    ('astropy__astropy-1', 'a-b-c')
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-")[:MAX_NAME_CHARS]
    if not safe:
        raise ConfigError(f"{name!r} cannot name a task")
    return safe


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(number from 1, row) of a file of JSON lines or a Parquet file. Raises ConfigError with the line."""
    if path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            yield from enumerate(parquet.read_table(path).to_pylist(), 1)
        except (ArrowException, OSError) as error:
            raise ConfigError(f"not a Parquet file: {error}", file=str(path)) from None
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(path)) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"not a line of JSON: {error}", file=str(path), line=number) from None
            if not isinstance(row, dict):
                raise ConfigError("not a JSON object", file=str(path), line=number)
            yield number, row


class SuiteRow:
    """One row, read by the names that a field has in public data sets. Raises ConfigError with the line."""

    def __init__(self, path: Path, number: int, row: dict[str, object]):
        self._path, self._number, self.values = path, number, row

    def text(self, *names: str) -> str:
        """The first of these fields that is there."""
        for name in names:
            if isinstance(value := self.values.get(name), str | int | float) and str(value).strip():
                return str(value)
        raise self.error(f"has no {' or '.join(names)}")

    def optional(self, *names: str) -> str:
        return next((str(self.values[name]) for name in names if self.values.get(name) not in (None, "")), "")

    def texts(self, name: str) -> list[str]:
        """A list of texts, as one or as its JSON."""
        value = self.values.get(name)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError:
                raise self.error(f"{name} is not a list") from None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(f"{name} is not a list of texts")
        return value

    def error(self, message: str) -> ConfigError:
        return ConfigError(message, file=str(self._path), line=self._number)
