"""A sandbox on an image: what of this machine is put into it, where, and whether the image has room for it."""

from __future__ import annotations

import os
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.core.errors import ImageError
from qwengyre.images.image import Image, ImageUser
from qwengyre.images.rooted import open_in
from qwengyre.sandbox import overlay, own_python
from qwengyre.sandbox.isolation import Mount, interpreter, interpreter_folders, open_to_others, outermost
from qwengyre.sandbox.plans import RootPlan

HOST: Final = "/run/qwengyre/host"
"""Where an image has what of this machine the harness's own Python needs; nothing of it is in the image's PATH."""
OWN_PYTHON: Final = "/run/qwengyre/own_python.py"
OWN_PLACES: Final = ("/proc", "/dev", "/tests", "/logs", "/run/qwengyre", "/sys")
"""Of every sandbox: no workspace can be there, and no link of a workspace that leads there is scored."""
PT_INTERP: Final = 3
BASH: Final = "bin/bash"


class ImageRoot(msgspec.Struct, frozen=True):
    """The root file system of one sandbox."""

    root: str
    """Folder of the image."""
    place: str
    """An empty folder of this machine, which each sandbox mounts its own root over."""
    num_bytes: int
    """What may be written outside the workspace."""
    num_files: int
    user: ImageUser
    links: tuple[tuple[str, str], ...] = ()
    """Names that the image does not have, and what they are links to."""

    def command(self, uid: int | None, bwrap: Sequence[str]) -> list[str]:
        """bubblewrap's command line below the program that mounts this root; `uid` as `Identity` has it."""
        plan = RootPlan(root=self.root, place=self.place, uid=uid, num_bytes=self.num_bytes, num_files=self.num_files)
        return [interpreter(), "-I", "-S", overlay.__file__, msgspec.json.encode(plan).decode(), *bwrap]

    @property
    def merged(self) -> str:
        return f"{self.place}/merged"


def workspace_of(image: Image | None, default: str) -> str:
    """Where the workspace of an execution is. Raises ImageError for an image that has it where it cannot be."""
    if image is None or image.workdir == "/":
        return default
    for place in OWN_PLACES:
        if image.workdir == place or image.workdir.startswith(f"{place}/"):
            raise ImageError(f"image {image.name}: its WORKDIR is {image.workdir}, which is the sandbox's own: choose another")
    return image.workdir


def check_image(image: Image, targets: Iterable[str]) -> None:
    """The image has bash, and what is mounted in it lands where it is meant to. Raises ImageError.

    A link in the way could lead bubblewrap, which makes what is missing, to folders of this machine.
    """
    root = os.open(image.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for target in targets:
            _check_target(root, image, target)
        os.close(open_in(root, BASH, os.O_PATH))
    except OSError:
        raise ImageError(f"image {image.name} has no /{BASH}, which runs tests/test.sh: install bash in it") from None
    finally:
        os.close(root)


def _check_target(root: int, image: Image, target: str) -> None:
    parts = [part for part in target.split("/") if part]
    if ".." in parts:
        raise ImageError(f"image {image.name}: {target} is not a path without ..")
    for length in range(1, len(parts) + 1):
        path = "/".join(parts[:length])
        try:
            mode = os.lstat(path, dir_fd=root).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISLNK(mode):
            raise ImageError(f"image {image.name}: /{path} is a link, and a sandbox needs the place {target} for itself")
        if length < len(parts) and not stat.S_ISDIR(mode):
            raise ImageError(f"image {image.name}: /{path} is not a folder, and a sandbox needs the place {target} for itself")


def image_has(image: Image, path: str) -> bool:
    return os.path.lexists(image.root + path)


class OwnPython:
    """The Python of QwenGyre as it is started on another system's files: by its own loader, with its own libraries."""

    def __init__(self, module_folders: Sequence[str], search: Sequence[str]):
        """`search` are folders of this machine with modules for a harness; what of them is not mounted is passed over."""
        folders = (*interpreter_folders(), *module_folders)
        self._folders = tuple(dict.fromkeys(os.path.realpath(path) for path in folders))
        self._search = search
        program = interpreter()
        loader = loader_of(Path(program))
        self._command = [HOST + program, "-s", "-P"]
        if loader:
            inhibit = [] if "musl" in loader else ["--inhibit-cache"]
            libraries = ":".join(HOST + folder for folder in _library_folders())
            self._command[:0] = [HOST + os.path.realpath(loader), *inhibit, "--library-path", libraries]

    @property
    def mounts(self) -> list[Mount]:
        shown = [path for folder in outermost(self._folders) for path in open_to_others(folder)]
        shown += ["/usr", *(name for name in ("/lib", "/lib64") if os.path.isdir(name) and not os.path.islink(name))]
        return [Mount(own_python.__file__, OWN_PYTHON), *(Mount(path, HOST + path) for path in shown)]

    def bare(self, *arguments: str) -> list[str]:
        """A command line of ours, without modules but the standard library's."""
        return [*self._command, "-I", "-S", *arguments]

    def harness(self, command: Sequence[str], search: Sequence[str], *, ignores_variables: bool) -> list[str]:
        """`python -m MODULE ...` or `python FILE ...`. Raises ImageError for other options of Python.

        `search` are more folders with modules, of the image or of this machine. `ignores_variables`: the image sets variables for a Python of its own.
        """
        what = command[1] if len(command) > 1 else ""
        if not what or (what.startswith("-") and what != "-m") or (what == "-m" and len(command) < 3):
            raise ImageError(
                f"harness.command: on an image, the Python of QwenGyre runs `-m MODULE` or a file, not {what or 'nothing'!r}: "
                "name a program of the image, or one that is in readable"
            )
        folders = [*search, *(HOST + os.path.realpath(folder) for folder in (*search, *self._search))]
        return [*self._command, *(["-E"] if ignores_variables else []), OWN_PYTHON, ":".join(folders), *command[1:]]


def loader_of(program: Path) -> str:
    """The loader that an ELF program of 64 bits is started by; empty for a static one, and for what is not one."""
    with open(program, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02" or head[5] != 1:
            return ""
        (table,) = struct.unpack_from("<Q", head, 32)
        size, number = struct.unpack_from("<HH", head, 54)
        for place in range(number):
            file.seek(table + place * size)
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", file.read(size))
            if kind == PT_INTERP:
                file.seek(offset)
                return file.read(length).rstrip(b"\0").decode()
    return ""


def _library_folders() -> list[str]:
    """Where this process has its libraries from; those of modules that are not loaded yet lie beside them."""
    folders = {os.path.join(sys.base_prefix, "lib")}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[5].strip() if line.count(" ") >= 5 and "/" in line else ""
            if ".so" in os.path.basename(path) and path.startswith("/") and "site-packages" not in path:
                folders.add(os.path.dirname(os.path.realpath(path)))
    return sorted(folders)
