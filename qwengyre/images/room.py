"""What a store of images holds, and making room in it while nobody uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ImageError

USERS: Final = "users"
"""In `locks/`: held shared by every process that uses images of the store, alone by one that removes some."""
_held: dict[Path, int] = {}


class UnpackedImage(msgspec.Struct, frozen=True):
    """One unpacked image."""

    folder: Path
    num_bytes: int
    """As unpacked; files that stand for one another are counted once."""
    used_at: float
    """When a process got it last, in seconds since the epoch."""
    names: tuple[Path, ...]
    """Files of the store that lead to it."""


def hold(store: Path) -> None:
    """This process uses images of `store` until it ends: none of them is removed meanwhile. Waits while somebody makes room."""
    if store not in _held:
        fd = os.open(store / "locks" / USERS, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _held[store] = fd


@contextlib.contextmanager
def alone_in(store: Path) -> Iterator[None]:
    """Nobody gets an image meanwhile. Raises ImageError while a run uses the store."""
    fd = os.open(store / "locks" / USERS, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ImageError(f"a run uses images of {store}: make room when it has ended") from None
    finally:
        os.close(fd)


def stored_images(store: Path) -> list[UnpackedImage]:
    """The one that was used last first."""
    names: dict[str, list[Path]] = {}
    for name in (store / "names").iterdir():
        names.setdefault(name.read_text().removeprefix("sha256:"), []).append(name)
    found = []
    for folder in (store / "images").iterdir():
        record = folder / "image.json"
        size = msgspec.json.decode(record.read_bytes(), type=dict)["num_bytes"]
        found.append(UnpackedImage(folder, size, record.stat().st_mtime, tuple(names.get(folder.name, ()))))
    return sorted(found, key=lambda image: image.used_at, reverse=True)


def unused_for(images: list[UnpackedImage], seconds: float, now: float | None = None) -> list[UnpackedImage]:
    """Those that nobody got within the last `seconds`."""
    now = time.time() if now is None else now
    return [image for image in images if now - image.used_at >= seconds]


def remove(store: Path, image: UnpackedImage, remove_tree: Callable[[Path], None]) -> None:
    """Take an image out of the store, whole at once, then its files. Held in `alone_in`."""
    for name in image.names:
        name.unlink(missing_ok=True)
    going = store / "tmp" / f"{image.folder.name}.going"
    image.folder.rename(going)
    remove_tree(going)


def clear_leftovers(store: Path, remove_tree: Callable[[Path], None]) -> int:
    """What processes that died had begun. Held in `alone_in`. How many there were."""
    left = list((store / "tmp").iterdir())
    for folder in left:
        remove_tree(folder)
    return len(left)


def free_bytes(store: Path) -> int:
    return shutil.disk_usage(store).free
