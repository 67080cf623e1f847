"""Which folders of this machine every sandbox shows, and that none of them shows what a harness must not see."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.host import module_folders
from qwengyre.sandbox.isolation import interpreter_folders

SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Read-only in the sandbox of a harness and in that of its evaluator."""


class Private(NamedTuple):
    """A folder that no sandbox may show."""

    what: str
    """As the user knows it: a key, or words."""
    path: str
    whole: bool = True
    """No part of it either."""


def check_readable(config: HarnessConfig, private: Iterable[Private]) -> None:
    """Raises ConfigError for a folder that sandboxes show, and that holds something private or a part of it."""
    if config.isolation == "none":
        return
    shown = [(path, "readable") for path in config.readable]
    shown += [(path, "module") for path in module_folders(config)]
    shown += [(path, "system") for path in (*SYSTEM, *interpreter_folders())]
    for one in private:
        hidden = Path(os.path.realpath(one.path))
        for path, source in shown:
            real = Path(os.path.realpath(path))
            if hidden.is_relative_to(real) or (one.whole and real.is_relative_to(hidden) and source == "readable"):
                raise ConfigError(_sentence(path, source, one, hidden), key=None if source == "system" else "harness.readable")


def _sentence(path: str, source: str, private: Private, hidden: Path) -> str:
    if source == "system":
        return f"{private.what} ({hidden}) lies in {path}, which every harness sees: move it elsewhere"
    how = "the folder of the harness's own module " if source == "module" else ""
    return (
        f"{how}{path} would show every harness {private.what} ({hidden}): name only what the harness needs, "
        "such as the folder that it is installed in"
    )
