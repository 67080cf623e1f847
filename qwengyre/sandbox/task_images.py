"""The image that a task is to run on: as the task says it, and as it is had, before anything of the task is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.config.paths import absolute
from qwengyre.core.errors import ConfigError, ImageError
from qwengyre.images.config import SandboxConfig
from qwengyre.images.formats import on_disk
from qwengyre.images.image import Image
from qwengyre.images.reference import ImagePlace, parse_reference
from qwengyre.images.store import ImageStore
from qwengyre.images.wanted import WantedImage
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.isolation import WORKSPACE
from qwengyre.sandbox.on_image import workspace_of
from qwengyre.sandbox.task import Task
from qwengyre.sandbox.task_files import Problem, Problems
from qwengyre.sandbox.warm import NOT_ON_IMAGE

BUILD: Final = "build:"
"""Before a folder with a Dockerfile, in `sandbox.image`."""
NEEDS_BWRAP: Final = (
    'a task with an image runs in a sandbox: isolation = "bwrap" in [harness], or host_programs = true in [sandbox]'
)
PASSED_OVER: Final = frozenset({"sh", "bash", "env", "tini", "dumb-init", "docker-entrypoint.sh", "docker-init"})
"""Entrypoints that start what they are given, and that nothing is missed of."""
HOST_PROGRAMS: Final = "or run it on the programs of this machine (--host-programs; host_programs = true in [sandbox])"


def run_on_images(tasks: Sequence[Task], config: SandboxConfig, harness: HarnessConfig, say: Callable[[str], None]) -> list[Task]:
    """The tasks, each with the image that it runs on, which is in the store. Raises ConfigError for the first that cannot be had."""
    found, problems = with_images(tasks, config, say)
    for problem in problems:
        raise ConfigError(problem.message, file=problem.file)
    if any(task.image for task in found):
        _check_harness(harness)
    return found


def _check_harness(harness: HarnessConfig) -> None:
    if harness.isolation != "bwrap":
        raise ConfigError(NEEDS_BWRAP, key="harness.isolation")
    if harness.warm_start:
        raise ConfigError(f"{NOT_ON_IMAGE}", key="harness.warm_start")


def absolute_image(text: str, here: Path) -> str:
    """`sandbox.image` with its path absolute, if it is on disk or to be built; a wrong one as it is.

    >>> absolute_image("build:images/a", Path("/srv")), absolute_image("oci:./b:1", Path("/c")), absolute_image("python:3", Path("/c"))
    ('build:/srv/images/a', 'oci:/c/b:1', 'python:3')
    """
    if text.startswith(BUILD):
        return BUILD + absolute(text.removeprefix(BUILD), here)
    try:
        reference = parse_reference(text)
    except ImageError:
        return text
    if not on_disk(reference):
        return text
    kind = "oci" if reference.place is ImagePlace.FOLDER else "oci-archive"
    return f"{kind}:{absolute(reference.name, here)}{f':{reference.tag}' if reference.tag else ''}"


def mistakes_with_images(tasks: Iterable[Task], config: SandboxConfig, harness: HarnessConfig) -> Iterator[ConfigError]:
    """What is wrong with a run whose tasks name images, before any of them is had."""
    if any(_wanted(task, config) for task in tasks):
        try:
            _check_harness(harness)
        except ConfigError as error:
            yield error


def with_images(tasks: Sequence[Task], config: SandboxConfig, say: Callable[[str], None]) -> tuple[list[Task], list[Problem]]:
    """The tasks whose image could be had, with it, and what is wrong with the others. Blocks while images are fetched and built."""
    found, problems = [], Problems()
    had: dict[WantedImage, Image | ImageError] = {}
    store: ImageStore | None = None
    for task in tasks:
        wanted = _wanted(task, config)
        if wanted is None:
            found.append(msgspec.structs.replace(task, wanted_image=None))
            continue
        store = store or ImageStore(config)
        same = msgspec.structs.replace(wanted, where="", key="")
        if (known := had.get(same)) is None:
            known = had[same] = _get(store, wanted, say)
        if isinstance(known, ImageError):
            problems.error(Path(wanted.where or task.folder), f"{known}; {HOST_PROGRAMS}")
        else:
            found.append(msgspec.structs.replace(task, image=known))
    return found, problems.found


def _get(store: ImageStore, wanted: WantedImage, say: Callable[[str], None]) -> Image | ImageError:
    say(f"getting image {wanted.reference or os.path.join(wanted.context, wanted.dockerfile)}")
    try:
        image = store.get(wanted)
        workspace_of(image, WORKSPACE)
        first = os.path.basename(image.entrypoint[0]) if image.entrypoint else ""
        if first and first not in PASSED_OVER:
            raise ImageError(
                f"image {image.name}: its ENTRYPOINT ({' '.join(image.entrypoint)}) would not be run, as `docker exec` does not: "
                "start in tests/test.sh or in the harness what it starts, and set ENTRYPOINT [] in the image"
            )
        return image
    except ImageError as error:
        return error


def _wanted(task: Task, config: SandboxConfig) -> WantedImage | None:
    if config.host_programs:
        return None
    if task.wanted_image is not None:
        return task.wanted_image
    if config.image.startswith(BUILD):
        context = os.path.abspath(os.path.expanduser(config.image.removeprefix(BUILD)))
        return WantedImage(context=context, where=os.path.join(context, "Dockerfile"), key="sandbox.image")
    return WantedImage(config.image, key="sandbox.image") if config.image else None
