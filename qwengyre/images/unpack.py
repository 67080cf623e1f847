"""Layers of an image, one over the other, as a folder. What a layer says is somebody else's, and may be hostile.

Names are resolved inside of the folder by the kernel. Nothing is owned by anybody but this user; setuid and setgid bits, attributes and
devices of /dev are left out; a device elsewhere, a path with `..`, and more than the bounds allow are refused.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any, Final, Protocol

import msgspec

from qwengyre.core.errors import ImageError
from qwengyre.images.rooted import open_in

MIB: Final = 1024 * 1024
CHUNK_BYTES: Final = 1024 * 1024
MAX_HEADER_BYTES: Final = 16 * MIB
"""What one header of a tar archive may make its reader hold; long names and attributes are a few KiB."""
MAX_DEPTH: Final = 128
"""Folders of one path; 4,096 characters are all that Linux takes."""
WHITEOUT, OPAQUE, OTHER_MARKS = ".wh.", ".wh..wh..opq", ".wh..wh."
"""Names by which a layer removes what the layers below it hold."""
FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
ZSTD: Final = b"\x28\xb5\x2f\xfd"
NO_ZSTD: Final = (
    "a layer is compressed with zstd, which is not read here: copy it with `skopeo copy --dest-compress-format gzip "
    "--dest-force-compress-format`"
)


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class Bounds(msgspec.Struct, frozen=True):
    """What one image may take."""

    num_bytes: int
    num_entries: int


class Unpacked(msgspec.Struct):
    """What has been unpacked so far."""

    num_bytes: int = 0
    num_entries: int = 0
    left_out: int = 0
    """Devices of /dev, and pipes."""


class Unpacker:
    """Applies layers, the lowest first, to a folder that exists and is empty. Close it at the end."""

    def __init__(self, root: Path, bounds: Bounds):
        self._root = os.open(root, FOLDER | os.O_CLOEXEC)
        self._bounds = bounds
        self._of_layer: set[tuple[str, ...]] = set()
        self.done = Unpacked()

    def close(self) -> None:
        os.close(self._root)

    def apply(self, layer: IO[bytes], name: str, diff_id: str) -> None:
        """Apply one layer, whose contents have the digest `diff_id`, and close it. Raises ImageError."""
        self._of_layer = set()
        max_bytes = self._bounds.num_bytes + self._bounds.num_entries * 4 * tarfile.BLOCKSIZE
        try:
            with io.BufferedReader(layer, CHUNK_BYTES) as buffered:  # type: ignore[type-var]
                reader = _Forward(_decompressed(buffered), max_bytes)
                with tarfile.open(fileobj=reader, mode="r:") as archive:
                    while (member := archive.next()) is not None:
                        self._apply(archive, member)
                        archive.members = []  # type: ignore[attr-defined]  # a million of them would be a gigabyte
                digest = reader.digest()
        except OSError as error:
            raise _failed(name, error) from error
        except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise ImageError(f"layer {name} is damaged: {error}") from error
        if digest != diff_id:
            raise ImageError(f"layer {name} is damaged: its digest is {digest}, and the image says {diff_id}")

    def _apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            return
        self._count(member)
        *above, last = parts
        folder = self._folder(above)
        try:
            if last.startswith(WHITEOUT):
                self._remove_lower(folder, tuple(above), last)
                return
            self._of_layer.update(tuple(parts[:length]) for length in range(1, len(parts) + 1))
            self._make(archive, member, folder, parts)
        finally:
            os.close(folder)

    def _count(self, member: tarfile.TarInfo) -> None:
        self.done.num_entries += 1
        self.done.num_bytes += max(member.size, 0) if member.isreg() else 0
        if self.done.num_entries > self._bounds.num_entries:
            raise ImageError(f"more than {self._bounds.num_entries:,} files (sandbox.max_image_files)")
        if self.done.num_bytes > self._bounds.num_bytes:
            raise ImageError(f"more than {self._bounds.num_bytes // MIB:,} MB when unpacked (sandbox.max_image_mb)")

    def _folder(self, parts: list[str]) -> int:
        """A descriptor of a folder of the image, which is made if it is missing."""
        try:
            return open_in(self._root, "/".join(parts), FOLDER)
        except OSError as error:
            if error.errno != errno.ENOENT or not parts:
                raise
        parent = self._folder(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=parent)
        finally:
            os.close(parent)
        return open_in(self._root, "/".join(parts), FOLDER)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, parts: list[str]) -> None:
        name = parts[-1]
        if member.isdir():
            self._make_folder(member, folder, name)
        elif member.isreg():
            _clear(folder, name)
            self._make_file(archive, member, folder, name)
        elif member.issym():
            _clear(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            self._make_link(member, folder, name)
        elif member.isfifo() or (member.isdev() and parts[0] == "dev"):
            self.done.left_out += 1
        elif member.isdev():
            raise ImageError(f"{member.name} is a device outside of /dev, which no image needs")
        else:
            raise ImageError(f"{member.name} is of an unknown kind ({member.type!r})")

    def _make_folder(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        found = _lstat(folder, name)
        if found is None or not stat.S_ISDIR(found.st_mode):
            _clear(folder, name)
            os.mkdir(name, dir_fd=folder)
        os.chmod(name, member.mode & 0o777 | stat.S_IRWXU, dir_fd=folder)

    def _make_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        source = archive.extractfile(member)
        assert source is not None, "asked for regular files only"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            os.fchmod(target.fileno(), member.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
            seconds = max(float(member.mtime), 0.0)
            os.utime(target.fileno(), (seconds, seconds))  # else every compiled file of Python would look out of date

    def _make_link(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        *above, last = _parts(member.linkname) or [""]
        source = open_in(self._root, "/".join(above), FOLDER)
        try:
            if (found := _lstat(source, last)) is None or stat.S_ISDIR(found.st_mode):
                raise ImageError(f"{member.name} is a link to {member.linkname}, which is not a file of the image")
            if os.path.sameopenfile(source, folder) and last == name:
                return
            _clear(folder, name)
            os.link(last, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(source)

    def _remove_lower(self, folder: int, above: tuple[str, ...], mark: str) -> None:
        """Remove what the layers below have under this name; what this layer itself has made stays."""
        if mark == OPAQUE:
            for name in os.listdir(folder):
                self._remove_unless_of_layer(folder, above, name)
        elif not mark.startswith(OTHER_MARKS):
            self._remove_unless_of_layer(folder, above, mark.removeprefix(WHITEOUT))

    def _remove_unless_of_layer(self, folder: int, above: tuple[str, ...], name: str) -> None:
        path = (*above, name)
        if name in ("", ".", ".."):
            raise ImageError(f"{'/'.join(path)} cannot be removed: it is not a name")
        if path not in self._of_layer:
            _clear(folder, name)
            return
        found = _lstat(folder, name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            inner = os.open(name, FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                self._remove_lower(inner, path, OPAQUE)
            finally:
                os.close(inner)


class _Forward(io.RawIOBase):
    """A stream as tarfile reads it: forward, with one byte back. Digests everything, and bounds what is read, and what is held."""

    def __init__(self, source: Readable, max_bytes: int):
        self._source, self._left = source, max_bytes
        self._digest = hashlib.sha256()
        self._at = 0
        self._last = b""
        self._is_back = False

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._is_back

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > MAX_HEADER_BYTES:
            raise ImageError(f"a header of more than {MAX_HEADER_BYTES // MIB} MB")
        if size == 0:
            return b""
        back, self._is_back = (self._last if self._is_back else b""), False
        pieces, wanted = [back], size - len(back)
        while wanted and (data := self._source.read(wanted)):
            self._left -= len(data)
            if self._left < 0:
                raise ImageError("more than an image may hold (sandbox.max_image_mb)")
            self._digest.update(data)
            self._at += len(data)
            pieces.append(data)
            wanted -= len(data)
        found = b"".join(pieces)
        self._last = found[-1:] or self._last
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self._at - 1:
            raise ImageError("it is not one archive from start to end")
        if offset == self._at - 1:
            self._is_back = True
            return offset
        while self.tell() < offset and self.read(min(CHUNK_BYTES, offset - self.tell())):
            pass
        return self.tell()

    def digest(self) -> str:
        while self.read(CHUNK_BYTES):
            pass
        return f"sha256:{self._digest.hexdigest()}"


def _decompressed(buffered: io.BufferedReader[Any]) -> Readable:
    start = buffered.peek(6)[:6]
    if start.startswith(ZSTD):
        raise ImageError(NO_ZSTD)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=buffered)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(buffered)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(buffered)
    return buffered


def _parts(name: str) -> list[str]:
    """A name of a layer as parts of a path. Raises ImageError for one that leads out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ImageError(f"{name!r} leads out of the image")
    if len(parts) > MAX_DEPTH:
        raise ImageError(f"{'/'.join(parts[:4])}/... is more than {MAX_DEPTH} folders deep")
    return parts


def _lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return None


def _clear(folder: int, name: str) -> None:
    """Remove what has this name in an open folder, if anything has."""
    found = _lstat(folder, name)
    if found is None:
        return
    if stat.S_ISDIR(found.st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _failed(layer: str, error: OSError) -> ImageError:
    if error.errno in FULL:
        return ImageError("no space left on the disk of the store (sandbox.store)")
    where = f"{error.filename}: " if error.filename else ""
    return ImageError(f"layer {layer} cannot be unpacked: {where}{error.strerror or error}")
