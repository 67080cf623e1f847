"""Which image something is to run on, and what it wants to be different in it."""

from __future__ import annotations

import msgspec


class WantedImage(msgspec.Struct, frozen=True):
    """An image by name, or a folder to build one of."""

    reference: str = ""
    """As `parse_reference` takes it; empty: build."""
    context: str = ""
    """Folder with what the build may copy."""
    dockerfile: str = "Dockerfile"
    """Path in that folder."""
    build_timeout_s: float | None = None
    """Replaces `sandbox.build_timeout_s`."""
    where: str = ""
    """File that asks for it, and `key` in it."""
    key: str = ""
    env: tuple[tuple[str, str], ...] = ()
    """More variables than the image's own; these win."""
    workdir: str = ""
    user: str = ""
