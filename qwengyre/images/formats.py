"""Images on disk: OCI layouts, and archives of them or of `docker save`. Read without another program."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from qwengyre.core.errors import ImageError
from qwengyre.images.reference import ImagePlace, Reference

MAX_DOCUMENT_BYTES: Final = 16 * 1024 * 1024
"""Of an index, a manifest or a configuration; OCI asks readers for 4 MiB."""
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Name of a machine in the kernel, and in images."""
REF_NAME: Final = "org.opencontainers.image.ref.name"
MAX_INDEXES: Final = 4
"""An index may list indexes, but not for ever."""


class ImageLayer(NamedTuple):
    name: str
    diff_id: str
    """Digest of what it holds, before compression."""
    open: Callable[[], IO[bytes]]


class StoredImage(NamedTuple):
    """An image as it lies on disk."""

    digest: str
    """Of its configuration, which holds the digests of all layers: equal digests are equal images."""
    config: dict[str, Any]
    layers: tuple[ImageLayer, ...]
    """The lowest first."""


class _Blobs(NamedTuple):
    """Reads parts of an image by name. Both raise ImageError for what is not there."""

    read: Callable[[str], bytes]
    open: Callable[[str], IO[bytes]]
    has: Callable[[str], bool]


@contextlib.contextmanager
def stored_image(reference: Reference) -> Iterator[StoredImage]:
    """The image that `reference` names on disk; its layers can be opened while the block runs. Raises ImageError."""
    path = Path(os.path.expanduser(reference.name))
    if not path.exists():
        raise ImageError(f"image {reference} does not exist")
    with contextlib.ExitStack() as stack:
        try:
            is_folder = path.is_dir()
            blobs = _folder(path) if is_folder else _archive(stack.enter_context(tarfile.open(path, "r:*")), path)
            yield _read(blobs, reference)
        except tarfile.TarError as error:
            raise ImageError(f"{path} is not an archive of an image: {error}") from error
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error.strerror or error}") from error


def _folder(path: Path) -> _Blobs:
    def opened(name: str) -> IO[bytes]:
        try:
            return open(path / name, "rb")
        except FileNotFoundError:
            raise ImageError(f"{path} holds no {name}") from None

    def read(name: str) -> bytes:
        with opened(name) as file:
            return file.read(MAX_DOCUMENT_BYTES)

    return _Blobs(read, opened, lambda name: (path / name).is_file())


def _archive(archive: tarfile.TarFile, path: Path) -> _Blobs:
    members = {member.name.removeprefix("./"): member for member in archive if member.isreg() or member.islnk() or member.issym()}

    def opened(name: str) -> IO[bytes]:
        file = archive.extractfile(members[name]) if name in members else None
        if file is None:
            raise ImageError(f"{path} holds no {name}")
        return file

    return _Blobs(lambda name: opened(name).read(MAX_DOCUMENT_BYTES), opened, members.__contains__)


def _read(blobs: _Blobs, reference: Reference) -> StoredImage:
    if blobs.has("index.json"):
        manifest = _document(blobs, _chosen(blobs, "index.json", reference, MAX_INDEXES))
        config, layers = _blob(manifest.get("config")), [_blob(layer) for layer in _list(manifest, "layers")]
    elif blobs.has("manifest.json"):
        config, layers = _of_docker(blobs, reference)
    else:
        raise ImageError(f"{reference} is not an image: it holds neither index.json (OCI) nor manifest.json (docker save)")
    return _image(blobs, config, layers, reference)


def _image(blobs: _Blobs, config: str, layers: list[str], reference: Reference) -> StoredImage:
    data = blobs.read(config)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if config.startswith("blobs/") and not config.endswith(digest.partition(":")[2]):
        raise ImageError(f"{reference} is damaged: {config} does not have the digest that it is named by")
    document = _parsed(data, config)
    wanted = MACHINES.get(platform.machine(), platform.machine())
    if (found := document.get("architecture", wanted)) != wanted or document.get("os", "linux") != "linux":
        raise ImageError(f"{reference} is for {document.get('os', 'linux')} on {found}; this machine needs linux on {wanted}")
    rootfs = document.get("rootfs")
    diff_ids = _list(rootfs if isinstance(rootfs, dict) else {}, "diff_ids")
    if len(diff_ids) != len(layers) or not all(isinstance(one, str) and DIGEST.fullmatch(one) for one in diff_ids):
        raise ImageError(f"{reference} is damaged: its configuration lists {len(diff_ids)} layers, and it has {len(layers)}")

    def opener(name: str) -> Callable[[], IO[bytes]]:
        return lambda: blobs.open(name)

    pairs = zip(layers, diff_ids, strict=True)
    return StoredImage(digest, document, tuple(ImageLayer(name[-64:], diff_id, opener(name)) for name, diff_id in pairs))


def _chosen(blobs: _Blobs, name: str, reference: Reference, left: int) -> str:
    """The manifest that an index means for this machine and the tag that was asked for, as a name of a blob."""
    listed = [one for one in _list(_document(blobs, name), "manifests") if isinstance(one, dict)]
    if name == "index.json" and reference.tag:
        listed = [one for one in listed if reference.tag in _names(one)]
    machine = MACHINES.get(platform.machine(), platform.machine())
    for_machine = [one for one in listed if (one.get("platform") or {}).get("architecture", machine) == machine]
    if len(for_machine) != 1 or not left:
        names = ", ".join(sorted({tag for one in listed for tag in _names(one)})) or "without names"
        what = (
            f"no image {reference.tag}".rstrip()
            if not listed
            else f"{len(for_machine)} images for {machine} ({names}): name one of them as PATH:TAG"
        )
        raise ImageError(f"{reference} holds {what}")
    media_type = str(for_machine[0].get("mediaType", ""))
    chosen = _blob(for_machine[0])
    return _chosen(blobs, chosen, reference, left - 1) if "index" in media_type or "manifest.list" in media_type else chosen


def _names(descriptor: dict[str, Any]) -> list[str]:
    full = str((descriptor.get("annotations") or {}).get(REF_NAME, ""))
    return [full, full.rpartition(":")[2]] if full else []


def _of_docker(blobs: _Blobs, reference: Reference) -> tuple[str, list[str]]:
    """Names of the configuration and the layers in what `docker save` writes."""
    listed = msgspec.json.decode(blobs.read("manifest.json"))
    images = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if reference.tag:
        images = [one for one in images if any(tag.rpartition(":")[2] == reference.tag for tag in one.get("RepoTags") or ())]
    if len(images) != 1:
        raise ImageError(f"{reference} holds {len(images)} images: one is needed, named as PATH:TAG where there are several")
    config, layers = images[0].get("Config"), images[0].get("Layers")
    if not isinstance(config, str) or not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise ImageError(f"{reference} is damaged: its manifest.json names no configuration and layers")
    return config, layers


def _document(blobs: _Blobs, name: str) -> dict[str, Any]:
    return _parsed(blobs.read(name), name)


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImageError(f"{name} of the image is damaged: {error}") from None
    if not isinstance(document, dict):
        raise ImageError(f"{name} of the image is damaged: not a JSON object")
    return document


def _list(document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise ImageError(f"the image is damaged: no list of {key}")
    return value


def _blob(descriptor: object) -> str:
    """Where a descriptor's contents lie. Only a digest is taken, never a path."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ImageError(f"the image is damaged: {digest!r} is not a digest (sha256:...)")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def on_disk(reference: Reference) -> bool:
    return reference.place in (ImagePlace.FOLDER, ImagePlace.ARCHIVE)
