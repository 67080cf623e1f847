"""The config in a run folder, for those who only look at the run: it may be of another version, so keys are taken one by one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from qwengyre.core.errors import ConfigError

Table = TypeVar("Table", bound=msgspec.Struct)


class RecordedConfig:
    """Raises ConfigError when the file is no TOML. What other versions wrote is left out and named in `ignored`."""

    def __init__(self, path: Path) -> None:
        self.ignored: list[str] = []
        """Keys of the tables asked for that this version does not know, or knows with another kind of value."""
        self._path = path
        try:
            self._tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"cannot read this file ({error.strerror})", file=str(path)) from error
        except ValueError as error:
            raise ConfigError(f"not valid TOML: {error}", file=str(path)) from error

    def table(self, name: str, struct: type[Table]) -> Table:
        """The table `name`, with the default of every key that is absent or ignored. Raises ConfigError for values that contradict
        each other."""
        kinds, known = get_type_hints(struct), dict[str, object]()
        found = self._tables.get(name, {})
        for key, value in found.items() if isinstance(found, dict) else ():
            try:
                known[key] = msgspec.convert(value, kinds[key])
            except (KeyError, msgspec.ValidationError):
                self.ignored.append(f"{name}.{key}")
        try:
            return struct(**known)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), file=str(self._path), key=name) from error
