"""Load TOML into a frozen Struct, strictly. Whatever is wrong becomes a ConfigError with file, line, key and what to write."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from qwengyre.config.convert import Converter, Mistake
from qwengyre.config.lines import KeyPath, key_lines, line_of
from qwengyre.core.errors import ConfigError

Loaded = TypeVar("Loaded", bound=msgspec.Struct)

_AT_LINE: Final = re.compile(r" \(at line (\d+), column \d+\)$")


class Reading(msgspec.Struct, Generic[Loaded], frozen=True):
    """A file as far as it can be understood."""

    value: Loaded | None
    """With the default of every key that is wrong. None when the file cannot be made sense of without the keys that are wrong."""
    mistakes: tuple[ConfigError, ...]
    """All of them, in the order of the Structs."""


def load(path: str | Path, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Read the TOML file at `path` into `struct`; `overrides` such as "scheduler.steps=20" win over the file.

    Raises ConfigError naming file, line and key: a missing or broken file, an unknown key (with the nearest valid one),
    a value of the wrong type (with what was expected), a missing key, or a rule of a `__post_init__`. Several
    mistakes are raised as one error.
    """
    return _whole(read(path, struct, overrides))


def loads(text: str, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = (), *, file: str = "<text>") -> Loaded:
    """As `load`, from a text."""
    return _whole(reads(text, struct, overrides, file=file))


def read(path: str | Path, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = ()) -> Reading[Loaded]:
    """As `load`, but what is wrong comes with what is right. Raises ConfigError for a file that is not TOML."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark, as some editors write it, is not a mistake
    except OSError as error:
        raise ConfigError(f"cannot read this file ({error.strerror})", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("this file is not UTF-8 text", file=str(path)) from error
    return reads(text, struct, overrides, file=str(path))


def reads(
    text: str, struct: type[Loaded], overrides: list[str] | tuple[str, ...] = (), *, file: str = "<text>"
) -> Reading[Loaded]:
    """As `read`, from a text."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        message = f"not valid TOML: {_AT_LINE.sub('', str(error))}"
        raise ConfigError(message, file=file, line=int(at[1]) if at else text.count("\n") + 1) from error
    origin, mistakes = _Origin(file, key_lines(text)), list[ConfigError]()
    for override in overrides:
        try:
            key, value = parse_override(override)
            _put(table, key, value, override)
            origin.overrides[key] = override
        except ConfigError as error:
            mistakes.append(error)
    converter = Converter(struct)
    loaded = converter.convert(table)
    mistakes += [origin.error(mistake) for mistake in converter.mistakes]
    return Reading(loaded, tuple(mistakes))


def _whole(reading: Reading[Loaded]) -> Loaded:
    if reading.mistakes:
        raise ConfigError.of_all(reading.mistakes)
    assert reading.value is not None, "a file without mistakes can be used"
    return reading.value


def parse_override(override: str) -> tuple[KeyPath, Any]:
    """Split "a.b=3" into its key and its TOML value; a value that is not TOML is taken as a string.

    >>> parse_override("scheduler.policy=colocate"), parse_override("a.b=[1, 2]")
    ((('scheduler', 'policy'), 'colocate'), (('a', 'b'), [1, 2]))
    """
    key, equals, value = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError("write it as table.key=value, for instance scheduler.steps=20", file=f"--set {override}")
    try:
        return parts, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return parts, value.strip()


class _Origin:
    """Where each value came from: the file or an override."""

    def __init__(self, file: str, lines: dict[KeyPath, int]):
        self.file, self.lines, self.overrides = file, lines, dict[KeyPath, str]()

    def error(self, mistake: Mistake) -> ConfigError:
        key, message = mistake.key, mistake.message
        dotted = ".".join(key) or None
        # An override that put something below `key` is what made it wrong: the file has another value there.
        override = next((said for at, said in self.overrides.items() if at[: len(key)] == key), None) if key else None
        if override is not None:
            return ConfigError(message, file=f"--set {override}", key=dotted)
        return ConfigError(message, file=self.file, key=dotted, line=line_of(self.lines, key))


def _put(table: dict[str, Any], key: KeyPath, value: object, override: str) -> None:
    for part in key[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{part} is a value, not a table", file=f"--set {override}", key=".".join(key))
    table[key[-1]] = value
