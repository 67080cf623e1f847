"""The store of unpacked images, one for all runs of a user: an image is in it whole, or not at all.

    images/HEX/root, image.json     by the digest of the image's configuration; never changed once it is there
    names/HEX                       what a name of a registry, or the content of a folder that was built, led to
    tmp/HEX, locks/HEX              what is being made, by one process at a time

Nothing of the store is removed here, but by `room` while no process uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ImageError
from qwengyre.images import tools
from qwengyre.images.config import SandboxConfig
from qwengyre.images.formats import on_disk, stored_image
from qwengyre.images.image import Image, described
from qwengyre.images.reference import Reference, parse_reference
from qwengyre.images.room import hold
from qwengyre.images.unpack import FULL, MIB, Bounds, Unpacker
from qwengyre.images.wanted import WantedImage

LOCK_PAUSE_S: Final = 0.1
"""Between two looks at a lock that another process has: it holds it for as long as an image takes."""


class _Record(msgspec.Struct, frozen=True):
    """`image.json`."""

    digest: str
    config: dict[str, Any]
    num_bytes: int
    num_entries: int
    left_out: int


class ImageStore:
    """Gets images, each once. Raises ImageError where its folder cannot be used."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self.folder = Path(os.path.expanduser(config.store))
        try:
            for name in ("images", "names", "tmp", "locks"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            hold(self.folder)
        except OSError as error:
            raise ImageError(f"sandbox.store: {self.folder} cannot be used: {error.strerror}") from None

    def get(self, wanted: WantedImage) -> Image:
        """The image, which is fetched, built and unpacked if it is not here yet. Blocks, for minutes. Raises ImageError."""
        name = wanted.reference or str(Path(wanted.context, wanted.dockerfile))
        try:
            digest = self._digest(wanted)
            return self._image(digest, name, wanted)
        except ImageError as error:
            raise ImageError(f"image {name}: {error}") from error
        except OSError as error:
            what = "no space left on the disk of the store (sandbox.store)" if error.errno in FULL else str(error)
            raise ImageError(f"image {name}: {what}") from error

    def _digest(self, wanted: WantedImage) -> str:
        """The digest of the image, which is in the store on return."""
        reference = parse_reference(wanted.reference) if wanted.reference else None
        if reference is not None and on_disk(reference):
            return self._unpacked(reference)
        key = _digest_of(f"{reference.place.value}:{reference.name}" if reference else f"build:{_digest_of_build(wanted)}")
        known = self.folder / "names" / key
        with self._locked(key):
            if known.is_file() and self._path(digest := known.read_text()).is_dir():
                return digest
            with self._temporary(f"{key}.got") as folder:
                got = self._got(wanted, reference, folder / "image")
                digest = self._unpacked(got)
            _write(known, digest.encode())
        return digest

    def _got(self, wanted: WantedImage, reference: Reference | None, folder: Path) -> Reference:
        folder.mkdir()
        config = self._config
        if reference is not None:
            return tools.fetch(reference, folder, config.pull_timeout_s, config.max_image_mb * MIB)
        return tools.build(wanted, folder, config.build_options, wanted.build_timeout_s or config.build_timeout_s)

    def _unpacked(self, reference: Reference) -> str:
        with stored_image(reference) as image:
            target = self._path(image.digest)
            with self._locked(target.name):
                if target.is_dir():
                    return image.digest
                with self._temporary(target.name) as folder:
                    root = folder / "image" / "root"
                    root.mkdir(parents=True)
                    unpacker = Unpacker(root, Bounds(self._config.max_image_mb * MIB, self._config.max_image_files))
                    try:
                        for layer in image.layers:
                            with layer.open() as file:
                                unpacker.apply(file, layer.name, layer.diff_id)
                    finally:
                        unpacker.close()
                    done = unpacker.done
                    record = _Record(image.digest, image.config, done.num_bytes, done.num_entries, done.left_out)
                    (folder / "image" / "image.json").write_bytes(msgspec.json.encode(record))
                    (folder / "image").rename(target)
        return image.digest

    def _image(self, digest: str, name: str, wanted: WantedImage) -> Image:
        folder = self._path(digest)
        record = msgspec.json.decode((folder / "image.json").read_bytes(), type=_Record)
        os.utime(folder / "image.json")  # used now: `room` removes what nobody uses
        num_bytes, num_entries, left_out = record.num_bytes, record.num_entries, record.left_out
        image = Image(name, digest, str(folder / "root"), num_bytes=num_bytes, num_entries=num_entries, left_out=left_out)
        return described(record.config, wanted, image)

    def _path(self, digest: str) -> Path:
        return self.folder / "images" / digest.removeprefix("sha256:")

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """One process, and one thread of it, at a time; the kernel gives the lock back when its holder dies."""
        longest_s = 2 * (self._config.pull_timeout_s + self._config.build_timeout_s)
        deadline = time.monotonic() + longest_s
        fd = os.open(self.folder / "locks" / key, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ImageError(f"another process has been at it for {longest_s:g} s: see {self.folder}") from None
                    time.sleep(LOCK_PAUSE_S)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """An empty folder, gone at the end. Held under a lock: what is there before is of a process that died."""
        folder = self.folder / "tmp" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.rename(path)


def _digest_of_build(wanted: WantedImage) -> str:
    """Of everything that a build of the folder can see: names, kinds, executable bits, contents. Links are not followed."""
    digest = hashlib.sha256(wanted.dockerfile.encode(errors="surrogateescape"))
    for folder, folders, files in os.walk(wanted.context):
        folders.sort()
        for name in sorted((*files, *folders)):
            path = os.path.join(folder, name)
            found = os.lstat(path)
            inside = os.path.relpath(path, wanted.context)
            digest.update(f"\0{inside}\0{found.st_mode:o}\0".encode(errors="surrogateescape"))
            if os.path.islink(path):
                digest.update(os.fsencode(os.readlink(path)))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
