"""A recorded run inside the package: a quickstart of 12 steps, as it lay when it had ended, without weights."""

from __future__ import annotations

import tarfile
from importlib.resources import files
from pathlib import Path


def unpack_demo(into: Path) -> Path:
    """Unpack the run below `into` and return the folder of runs that holds it."""
    with (
        files("qwengyre.dashboard").joinpath("demo.tar.xz").open("rb") as file,
        tarfile.open(fileobj=file, mode="r:xz") as archive,
    ):
        archive.extractall(into, filter="data")
    return into
