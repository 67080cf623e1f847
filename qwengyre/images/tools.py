"""Programs that get images and build them: skopeo, podman, buildah. None of them needs a daemon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from qwengyre.core.errors import ImageError
from qwengyre.images.reference import ImagePlace, Reference
from qwengyre.images.wanted import WantedImage

TAIL_CHARS: Final = 1500
"""Of what a program said, in a message."""
GRACE_S: Final = 10.0
"""For a program to end by itself, and clear up, once its time is over."""
NO_TOOL: Final = "{what} needs {tools}, and neither is installed (Debian, Ubuntu: apt install {package})"
ARCHIVE: Final = "image.tar"
LIMITED: Final = (
    "import os, resource, sys; most = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Limits the size of files, then becomes the program: what that starts before its parent could limit it would go on without."""


def fetch(reference: Reference, folder: Path, timeout_s: float, max_bytes: int) -> Reference:
    """Copy an image of a registry, or of podman here, into `folder`, which is empty; return what it is there. Raises ImageError."""
    if skopeo := shutil.which("skopeo"):
        source = f"{reference.place.value}:{'//' if reference.place is ImagePlace.REGISTRY else ''}{reference.name}"
        copy = [skopeo, "--insecure-policy", "copy", "--quiet", source, f"oci:{folder}:image"]
        _run(copy, f"getting {reference.name}", timeout_s, max_bytes)
        return Reference(ImagePlace.FOLDER, str(folder), "image")
    if podman := shutil.which("podman"):
        if reference.place is ImagePlace.REGISTRY:
            _run([podman, "pull", "--quiet", reference.name], f"getting {reference.name}", timeout_s)
        return _saved(podman, reference.name, folder, timeout_s)
    raise ImageError(NO_TOOL.format(what=f"getting {reference.name}", tools="skopeo or podman", package="skopeo"))


def build(wanted: WantedImage, folder: Path, options: Sequence[str], timeout_s: float) -> Reference:
    """Build a Dockerfile; the image comes into `folder`, which is empty. Raises ImageError with the end of what the build said."""
    what = f"building {Path(wanted.context, wanted.dockerfile)}"
    builder = shutil.which("podman") or shutil.which("buildah")
    if builder is None:
        raise ImageError(NO_TOOL.format(what=what, tools="podman or buildah", package="podman"))
    name = f"localhost/qwengyre-build-{folder.parent.name.lower()}:{os.getpid()}"
    file = str(Path(wanted.context, wanted.dockerfile))
    _run([builder, "build", *options, "--file", file, "--tag", name, wanted.context], what, timeout_s)
    try:
        if os.path.basename(builder) == "podman":
            return _saved(builder, name, folder, timeout_s)
        _run([builder, "push", "--quiet", name, f"oci:{folder}:image"], what, timeout_s)
        return Reference(ImagePlace.FOLDER, str(folder), "image")
    finally:
        subprocess.run([builder, "rmi", "--force", name], capture_output=True, check=False, timeout=GRACE_S * 6)


def _saved(podman: str, name: str, folder: Path, timeout_s: float) -> Reference:
    archive = folder / ARCHIVE
    _run([podman, "save", "--quiet", "--format", "oci-archive", "--output", str(archive), name], f"saving {name}", timeout_s)
    return Reference(ImagePlace.ARCHIVE, str(archive))


def _run(command: list[str], what: str, timeout_s: float, max_file_bytes: int | None = None) -> None:
    """Run a program to its end, with the variables of the user: it is his, and so are its settings. Raises ImageError."""
    tool = os.path.basename(command[0])
    if max_file_bytes is not None:
        command = [sys.executable, "-I", "-S", "-c", LIMITED, str(max_file_bytes), *command]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ImageError(f"{what} took more than {timeout_s:g} s ({tool} was ended)") from None
    finally:
        _end(process)
    if process.returncode != 0:
        text = said.decode(errors="replace").strip()[-TAIL_CHARS:]
        raise ImageError(f"{what} failed: {text or f'{tool} ended with exit code {process.returncode}'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started. Fine if it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    if process.stdout is not None:
        process.stdout.close()
