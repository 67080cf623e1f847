"""An image is in the store whole or not at all, once for everybody, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from qwengyre.core.errors import ImageError
from qwengyre.images import store as store_module
from qwengyre.images.config import SandboxConfig
from qwengyre.images.reference import ImagePlace, Reference
from qwengyre.images.store import ImageStore
from qwengyre.images.unpack import Unpacker
from qwengyre.images.wanted import WantedImage
from qwengyre.testing.images import layer, special, write_oci

PASSWD = b"root:x:0:0::/root:/bin/sh\napp:x:12:34::/srv/app:/bin/sh\n"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(SandboxConfig(store=str(tmp_path / "store"), max_image_mb=1))


def contents(store: ImageStore) -> list[str]:
    """What is in the store beside its locks."""
    return sorted(
        str(path.relative_to(store.folder)) for name in ("images", "names", "tmp") for path in (store.folder / name).iterdir()
    )


def test_an_image_is_unpacked_once_and_described(store: ImageStore, tmp_path: Path):
    config = {"Env": ["PATH=/opt/bin:/bin", "A=b=c"], "WorkingDir": "/srv//app/", "User": "app", "Entrypoint": ["/run.sh"]}
    oci = write_oci(tmp_path / "oci", [layer(("etc/passwd", PASSWD), ("srv/app/x", b""))], **config)
    image = store.get(WantedImage(f"oci:{oci}", env=(("MORE", "1"),)))
    assert (image.user.name, image.user.uid, image.user.gid, image.user.home) == ("app", 12, 34, "/srv/app")
    assert (image.workdir, image.entrypoint) == ("/srv/app", ("/run.sh",))
    assert image.env == {"PATH": "/opt/bin:/bin", "A": "b=c", "MORE": "1"}
    assert (Path(image.root) / "srv/app/x").exists()
    inode = Path(image.root).stat().st_ino
    again = store.get(WantedImage(f"oci:{oci}", workdir="/tmp/..//else", user="7:8"))
    assert Path(again.root).stat().st_ino == inode
    assert (again.workdir, again.user.uid, again.user.gid) == ("/else", 7, 8)
    assert contents(store) == [f"images/{image.digest.removeprefix('sha256:')}"]
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("user", "message"), [("nobody", "not in its /etc/passwd"), ("app:wheel", "not in its /etc/group")])
def test_a_user_that_is_not_there_is_refused(store: ImageStore, tmp_path: Path, user: str, message: str):
    oci = write_oci(tmp_path / "oci", [layer(("etc/passwd", PASSWD))], User=user)
    with pytest.raises(ImageError, match=message):
        store.get(WantedImage(f"oci:{oci}"))


def test_the_users_of_an_image_are_read_inside_of_it(store: ImageStore, tmp_path: Path):
    (tmp_path / "passwd").write_text("spy:x:5:5::/:/\n")
    oci = write_oci(tmp_path / "oci", [layer(("etc/passwd", str(tmp_path / "passwd")))], User="spy")
    with pytest.raises(ImageError, match="not in its /etc/passwd"):
        store.get(WantedImage(f"oci:{oci}"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer(("a", b"")), layer(("../x", b""))], "leads out"),
        ([layer(("a", bytes(2**20 + 1)))], "max_image_mb"),
        ([layer(("a", b"")), layer(special("b", b"4"))], "outside of /dev"),
    ],
)
def test_nothing_is_left_of_an_image_that_is_refused(store: ImageStore, tmp_path: Path, layers, message: str):
    oci = write_oci(tmp_path / "oci", layers)
    with pytest.raises(ImageError, match=f"image oci:.*{message}"):
        store.get(WantedImage(f"oci:{oci}"))
    assert contents(store) == []


def test_a_wrong_layer_is_not_taken(store: ImageStore, tmp_path: Path):
    oci = write_oci(tmp_path / "oci", [layer(("a", b""))], diff_ids=["sha256:" + "0" * 64])
    with pytest.raises(ImageError, match="is damaged: its digest is"):
        store.get(WantedImage(f"oci:{oci}"))
    assert contents(store) == []


def test_a_disk_that_fills_up_is_named_and_can_be_tried_again(store: ImageStore, tmp_path: Path, monkeypatch):
    oci = write_oci(tmp_path / "oci", [layer(("a", b"1")), layer(("b", b"2"))])
    real, calls = Unpacker._make_file, []

    def full(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *arguments)

    monkeypatch.setattr(Unpacker, "_make_file", full)
    with pytest.raises(ImageError, match="no space left on the disk of the store"):
        store.get(WantedImage(f"oci:{oci}"))
    assert contents(store) == []
    assert (Path(store.get(WantedImage(f"oci:{oci}")).root) / "b").read_bytes() == b"2"


def test_what_a_process_that_died_left_is_cleared(store: ImageStore, tmp_path: Path):
    oci = write_oci(tmp_path / "oci", [layer(("a", b"1"))])
    image = store.get(WantedImage(f"oci:{oci}"))
    name = image.digest.removeprefix("sha256:")
    (store.folder / "images" / name).rename(store.folder / "tmp" / name)
    assert (Path(store.get(WantedImage(f"oci:{oci}")).root) / "a").read_bytes() == b"1"
    assert contents(store) == [f"images/{name}"]


def test_of_many_who_want_an_image_one_gets_it(tmp_path: Path, monkeypatch):
    config = SandboxConfig(store=str(tmp_path / "store"))
    oci = write_oci(tmp_path / "oci", [layer(("a", b"1"))])
    fetched = []

    def fetch(reference: Reference, folder: Path, timeout_s: float, max_bytes: int) -> Reference:
        fetched.append(reference.name)
        return Reference(ImagePlace.FOLDER, str(oci))

    monkeypatch.setattr(store_module.tools, "fetch", fetch)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(ImageStore(config).get(WantedImage("example.org/a:1")).digest))
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert fetched == ["example.org/a:1"]


def test_a_build_is_done_again_only_when_its_folder_changed(store: ImageStore, tmp_path: Path, monkeypatch):
    oci = write_oci(tmp_path / "oci", [layer(("a", b"1"))])
    built = []

    def build(wanted: WantedImage, folder: Path, options, timeout_s: float) -> Reference:
        built.append(timeout_s)
        return Reference(ImagePlace.FOLDER, str(oci))

    monkeypatch.setattr(store_module.tools, "build", build)
    context = tmp_path / "environment"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\n")
    wanted = WantedImage(context=str(context), build_timeout_s=5.0)
    for change in (None, None, "x", "y"):
        if change:
            (context / "file").write_text(change)
        store.get(wanted)
    (context / "file").chmod(0o755)
    store.get(wanted)
    assert built == [5.0] * 4


def test_a_store_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ImageError, match=r"sandbox\.store"):
        ImageStore(SandboxConfig(store=str(tmp_path / "file")))
