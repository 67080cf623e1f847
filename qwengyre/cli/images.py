"""`qwengyre images [STORE]`: the unpacked images of this user, and room on their disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError
from qwengyre.images.config import SandboxConfig
from qwengyre.images.room import alone_in, clear_leftovers, free_bytes, remove, stored_images, unused_for
from qwengyre.sandbox.tree import remove_tree

DAY_S: Final = 86_400
GB: Final = 1e9
STORE: Final = Path(SandboxConfig().store)


def images(
    store: Annotated[Path, typer.Argument(metavar="[STORE]", help="The folder that sandbox.store names.")] = STORE,
    prune: Annotated[bool, typer.Option("--prune", help="List what could be removed; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove it.")] = False,
    unused: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="With --prune: images that no run got for so long.")
    ] = 30.0,
) -> None:
    """List the unpacked images of a store: what each takes on disk, and when it was used last. With --prune, make room.

    A removed image is fetched, built or unpacked again by the next run that wants it.
    """
    if yes and not prune:
        raise ConfigError("this is for --prune", key="--yes")
    folder = Path(os.path.expanduser(store))
    if not (folder / "images").is_dir():
        raise ConfigError("no image was unpacked here: name the folder that sandbox.store names", file=str(folder))
    now = time.time()
    found = stored_images(folder)
    listed = unused_for(found, unused * DAY_S, now) if prune else found
    for image in listed:
        age = (now - image.used_at) / DAY_S
        say(f"{image.folder.name[:16]}  {image.num_bytes / GB:8.2f} GB  used {age:.1f} days ago{'  removed' if yes else ''}")
    if yes:
        with alone_in(folder):
            for image in listed:
                remove(folder, image, remove_tree)
            clear_leftovers(folder, remove_tree)
    total = sum(image.num_bytes for image in listed) / GB
    hint = "" if yes or not prune or not listed else "; --yes removes them"
    say(f"{len(listed)} images, {total:.2f} GB; {free_bytes(folder) / GB:.1f} GB are free there{hint}")
