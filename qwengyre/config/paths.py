"""Paths of a run file: relative ones are those of the folder that a command is started in, and never of a later one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec

from qwengyre.core.ids import LocalPath

Config = TypeVar("Config", bound=msgspec.Struct)


def with_absolute_paths(config: Config, base: Path) -> Config:
    """`config` with every LocalPath in it, also those of its inner Structs, absolute: taken from `base`, `~` being the home folder."""
    changed: dict[str, object] = {}
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            changed[name] = with_absolute_paths(value, base)
        elif kind is LocalPath and value:
            changed[name] = absolute(value, base)
        elif kind == tuple[LocalPath, ...]:
            changed[name] = tuple(absolute(one, base) for one in value)
    return msgspec.structs.replace(config, **changed)


def absolute(path: str, base: Path) -> str:
    """
    >>> absolute("../tasks", Path("/home/me")), absolute("/data/./tasks", Path("/home/me"))
    ('/home/tasks', '/data/tasks')
    """
    return os.path.abspath(base / os.path.expanduser(path))
