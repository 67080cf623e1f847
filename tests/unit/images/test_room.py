"""Room is made in a store of images only while nobody uses it, and what is left of it works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.images.room import stored_images
from qwengyre.testing.images import layer, write_oci

GET = """
import sys
from qwengyre.images.config import SandboxConfig
from qwengyre.images.store import ImageStore
from qwengyre.images.wanted import WantedImage
for name in sys.argv[2:]:
    ImageStore(SandboxConfig(store=sys.argv[1])).get(WantedImage(f"oci:{name}"))
print("got", flush=True)
sys.stdin.read()
"""
DAY_S = 86_400


def user_of(store: Path, *images: Path) -> subprocess.Popen[str]:
    """A process that got images and still uses them."""
    command = [sys.executable, "-c", GET, str(store), *map(str, images)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "got\n"
    return process


def told(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(["images", *words]), ["images", *words])
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    return [write_oci(tmp_path / f"oci-{n}", [layer((f"opt/{n}", bytes(1000 * (n + 1))))]) for n in range(2)]


def test_old_images_go_and_the_others_stay(tmp_path: Path, images: list[Path]):
    store = tmp_path / "store"
    process = user_of(store, *images)
    new, old = stored_images(store)
    os.utime(old.folder / "image.json", (1, old.used_at - 40 * DAY_S))
    (store / "names" / "a").write_text(f"sha256:{old.folder.name}")
    (store / "names" / "b").write_text(f"sha256:{new.folder.name}")
    code, said = told(str(store), "--prune", "--yes")
    assert code != 0 and "a run uses images of" in said and old.folder.exists()
    process.communicate()
    code, said = told(str(store), "--prune")
    assert code == 0 and "1 images" in said and "--yes removes them" in said and old.folder.exists()
    (store / "tmp" / "half").mkdir()
    code, said = told(str(store), "--prune", "--yes")
    assert code == 0 and old.folder.name[:16] in said and new.folder.name[:16] not in said
    assert [image.folder for image in stored_images(store)] == [new.folder]
    assert [name.name for name in (store / "names").iterdir()] == ["b"] and not list((store / "tmp").iterdir())
    user_of(store, *images).communicate()  # what went is unpacked again
    assert len(stored_images(store)) == 2


def test_a_folder_that_is_no_store_is_named(tmp_path: Path):
    code, said = told(str(tmp_path))
    assert code != 0 and "no image was unpacked here" in said
