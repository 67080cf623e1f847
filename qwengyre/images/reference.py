"""What a text means as an image: on disk, among the images of podman here, or in a registry. Pure."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, NamedTuple

from qwengyre.core.errors import ImageError


class ImagePlace(Enum):
    FOLDER = "oci"
    """An OCI layout: a folder."""
    ARCHIVE = "archive"
    """One file, of an OCI layout or as `docker save` writes it."""
    LOCAL = "containers-storage"
    """The images of podman and buildah of this user."""
    REGISTRY = "docker"


class Reference(NamedTuple):
    place: ImagePlace
    name: str
    """A path, or the full name of an image."""
    tag: str = ""
    """Which image of a layout or archive with several."""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" if self.place in (ImagePlace.FOLDER, ImagePlace.ARCHIVE) else f"{self.place.value}:{self.name}"


TRANSPORTS: Final = {
    "oci": ImagePlace.FOLDER,
    "oci-archive": ImagePlace.ARCHIVE,
    "docker-archive": ImagePlace.ARCHIVE,
    "containers-storage": ImagePlace.LOCAL,
    "docker": ImagePlace.REGISTRY,
}
"""As `skopeo` names them."""
ON_DISK: Final = re.compile(r"(?:/|\./|\.\./|~/)")
NAME: Final = re.compile(
    r"(?P<host>(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|localhost|(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?=:\d+/))(?::\d+)?/)?"
    r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
"""Of an image in a registry, as `docker pull` takes it."""
HUB: Final = "docker.io/"


def parse_reference(text: str) -> Reference:
    """
    >>> parse_reference("python:3.12"), parse_reference("./base.tar"), str(parse_reference("oci:images/a:1"))
    (Reference(place=<ImagePlace.REGISTRY: 'docker'>, name='docker.io/library/python:3.12', tag=''), Reference(place=<ImagePlace.ARCHIVE: 'archive'>, name='./base.tar', tag=''), 'images/a:1')

    Raises ImageError for anything else.
    """
    transport, colon, rest = text.partition(":")
    place = TRANSPORTS.get(transport) if colon else None
    if place in (ImagePlace.FOLDER, ImagePlace.ARCHIVE):
        path, _, tag = rest.partition(":")
        if not path:
            raise ImageError(f"{text!r} names no path: write {transport}:PATH")
        return Reference(place, path, tag)
    if place is None and ON_DISK.match(text):
        return Reference(ImagePlace.ARCHIVE if text.endswith((".tar", ".tar.gz", ".tgz")) else ImagePlace.FOLDER, text)
    name = rest.removeprefix("//") if place else text
    found = NAME.fullmatch(name)
    if found is None:
        raise ImageError(f"{text!r} is not the name of an image: NAME:TAG, oci:FOLDER, oci-archive:FILE or docker-archive:FILE")
    host = found["host"] or ""
    if place is None:
        place = ImagePlace.LOCAL if host == "localhost/" else ImagePlace.REGISTRY
    if place is ImagePlace.REGISTRY and not host:
        name = f"{HUB}{'' if '/' in name else 'library/'}{name}"
    return Reference(place, name)
