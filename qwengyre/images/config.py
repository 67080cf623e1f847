"""The `[sandbox]` table of a run file: which image a task runs on, and where images are kept."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from qwengyre.core.ids import LocalPath

MAX_HOSTS: Final = 64
"""More than a node has use for is a slip of the pen."""


class SandboxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images that harnesses and evaluators run on."""

    image: str = ""
    """Image of every task that names none: a name in a registry, `localhost/NAME` (built here by podman), or on disk
    `oci:FOLDER[:TAG]`, `oci-archive:FILE`, `docker-archive:FILE`, or the path of one of these. Empty: the programs of this machine."""
    host_programs: bool = False
    """Run tasks that name an image, or have a Dockerfile, on the programs of this machine all the same."""
    store: LocalPath = LocalPath("~/.cache/qwengyre/images")
    """Folder of unpacked images, for all runs of this user."""
    max_image_mb: int = 20_000
    """Size of one image, unpacked. A larger one is refused."""
    max_image_files: int = 1_000_000
    """Files and folders of one image."""
    pull_timeout_s: float = 1800.0
    """How long getting one image may take."""
    build_timeout_s: float = 1800.0
    """How long building one Dockerfile may take; `[environment] build_timeout_sec` of a task replaces it."""
    build_options: tuple[str, ...] = ()
    """More options of `podman build`, such as `--network=host`."""

    hosts: int = 0
    """Processes that run harnesses and score workspaces, on the controller's node: a share of the executions each, and what one of them loses is
    dispatched again. 0: the controller does it itself."""

    def __post_init__(self) -> None:
        if not 0 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be from 0 to {MAX_HOSTS}")
        for name in ("max_image_mb", "max_image_files"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("pull_timeout_s", "build_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0 and finite")
        if self.image and self.host_programs:
            raise ValueError("host_programs and image contradict each other: leave one out")
