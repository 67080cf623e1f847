"""What is known of an unpacked image: where it lies, and what its makers wanted of whoever runs it."""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ImageError
from qwengyre.images.rooted import read_in
from qwengyre.images.wanted import WantedImage

MAX_FILE_BYTES: Final = 4 * 1024 * 1024
"""Of /etc/passwd and /etc/group."""
VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class ImageUser(msgspec.Struct, frozen=True):
    """Whom programs in a sandbox take themselves for. On the machine they are nobody, whatever this says."""

    name: str
    uid: int
    gid: int
    home: str


class Image(msgspec.Struct, frozen=True):
    """An unpacked image."""

    name: str
    """As it was asked for."""
    digest: str
    root: str
    """Folder of this machine, which nobody writes to."""
    user: ImageUser = ImageUser("root", 0, 0, "/root")
    workdir: str = "/"
    """Where its programs start; the workspace of an execution is a copy of what it has there."""
    env: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ()
    num_bytes: int = 0
    num_entries: int = 0
    left_out: int = 0


def described(document: dict[str, Any], wanted: WantedImage, image: Image) -> Image:
    """`image` with what its configuration says of its user, folder, variables and entrypoint, and what was wanted to be different.

    Raises ImageError for what cannot be honored.
    """
    config, name = document.get("config") or {}, image.name
    workdir = posixpath.normpath(wanted.workdir or str(config.get("WorkingDir") or "/"))
    return msgspec.structs.replace(
        image,
        user=find_user(wanted.user or str(config.get("User") or ""), image.root, name),
        workdir="/" + workdir.strip("/"),
        env=variables([str(text) for text in config.get("Env") or ()], name) | dict(wanted.env),
        entrypoint=tuple(str(word) for word in config.get("Entrypoint") or ()),
    )


def variables(lines: list[str], name: str) -> dict[str, str]:
    """`NAME=VALUE` lines as variables. Raises ImageError."""
    found = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals or not VARIABLE.fullmatch(key) or "\0" in value:
            raise ImageError(f"{name}: {line!r:.80} is not a variable (ENV)")
        found[key] = value
    return found


def find_user(wanted: str, root: str, name: str) -> ImageUser:
    """The user that `USER wanted` means in an image: a name or a number, perhaps with `:GROUP`. Raises ImageError."""
    user, _, group = wanted.partition(":")
    entries = [line.split(":") for line in _lines(root, "etc/passwd") if line.count(":") >= 6]
    entry = next((parts for parts in entries if user in (parts[0], parts[2])), None) if user else None
    if not user:
        entry = next((parts for parts in entries if parts[2] == "0"), None)
    if entry is None and user and not user.isdigit():
        raise ImageError(f"{name}: its user {user} is not in its /etc/passwd")
    uid = int(entry[2]) if entry else int(user or 0)
    gid = int(entry[3]) if entry else 0
    if group:
        groups = [line.split(":") for line in _lines(root, "etc/group") if line.count(":") >= 3]
        found = next((parts[2] for parts in groups if group == parts[0]), group if group.isdigit() else None)
        if found is None:
            raise ImageError(f"{name}: its group {group} is not in its /etc/group")
        gid = int(found)
    if not (0 <= uid < 2**32 - 1 and 0 <= gid < 2**32 - 1):
        raise ImageError(f"{name}: no user has the number {uid}:{gid}")
    return ImageUser(entry[0] if entry else ("root" if uid == 0 else "agent"), uid, gid, _home(entry, uid))


def _home(entry: list[str] | None, uid: int) -> str:
    if entry and entry[5].startswith("/"):
        return posixpath.normpath("/" + entry[5].strip("/"))
    return "/root" if uid == 0 else "/"


def _lines(root: str, path: str) -> list[str]:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return read_in(folder, path, MAX_FILE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []  # an image need not have one
    finally:
        os.close(folder)
