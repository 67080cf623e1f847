"""Images from elsewhere: a registry that hangs or fails, a Dockerfile that fails, a disk that fills up. Named errors, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qwengyre.core.errors import ImageError
from qwengyre.images.config import SandboxConfig
from qwengyre.images.store import ImageStore
from qwengyre.images.wanted import WantedImage
from qwengyre.testing.images import layer, write_oci
from qwengyre.testing.sandbox_kit import wait_for_the_end_of

NAME = WantedImage("example.org/agent:1")


def tool(folder: Path, name: str, script: str) -> None:
    """A program that stands in for one of the machine."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes before all others, with none of the programs that are looked for beyond it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("bash", "cat", "cp", "sleep", "dd"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def store(tmp_path: Path, **settings) -> ImageStore:
    return ImageStore(SandboxConfig(store=str(tmp_path / "store"), **settings))


def left(one: ImageStore) -> list[str]:
    return [path.name for name in ("images", "names", "tmp") for path in (one.folder / name).iterdir()]


def test_a_registry_that_hangs_is_given_up(tmp_path: Path, tools: Path):
    marker = f"sleep 2718.{os.getpid()}"
    tool(tools, "skopeo", f"{marker} & {marker}")
    one = store(tmp_path, pull_timeout_s=0.5)
    with pytest.raises(
        ImageError, match=r"image example.org/agent:1: getting example.org/agent:1 took more than 0.5 s \(skopeo was ended\)"
    ):
        one.get(NAME)
    wait_for_the_end_of(marker)
    assert left(one) == []


def test_what_a_registry_says_is_passed_on(tmp_path: Path, tools: Path):
    tool(tools, "skopeo", "echo 'manifest unknown: no such tag' >&2; exit 1")
    one = store(tmp_path)
    with pytest.raises(ImageError, match=r"image example\.org/agent:1: .* failed: manifest unknown: no such tag"):
        one.get(NAME)
    assert left(one) == []


def test_a_registry_that_sends_without_end_is_stopped(tmp_path: Path, tools: Path):
    tool(tools, "skopeo", 'for last; do :; done; folder=${last#oci:}; dd if=/dev/zero of="${folder%:image}/blob" bs=1M count=50')
    one = store(tmp_path, max_image_mb=3)
    with pytest.raises(ImageError, match=r"getting example\.org/agent:1 failed"):
        one.get(NAME)
    assert left(one) == []


def test_without_a_program_it_says_what_to_install(tmp_path: Path, tools: Path):
    with pytest.raises(ImageError, match=r"needs skopeo or podman, and neither is installed .*apt install skopeo"):
        store(tmp_path).get(NAME)
    with pytest.raises(ImageError, match="needs podman or buildah, and neither is installed"):
        store(tmp_path).get(WantedImage(context=str(tmp_path / "context")))


def test_an_image_of_a_registry_is_fetched_once(tmp_path: Path, tools: Path):
    oci = write_oci(tmp_path / "oci", [layer(("a", b"x"))], tag="image")
    tool(
        tools,
        "skopeo",
        f'echo "$@" >> {tmp_path}/calls; for last; do :; done; folder=${{last#oci:}}; cp -r {oci}/. "${{folder%:image}}"',
    )
    one = store(tmp_path)
    digests = {one.get(NAME).digest, ImageStore(SandboxConfig(store=str(one.folder))).get(NAME).digest}
    assert len(digests) == 1
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "docker://example.org/agent:1" in call


def test_a_build_that_fails_says_how(tmp_path: Path, tools: Path):
    tool(tools, "podman", 'case $1 in build) echo "STEP 2/2: RUN make"; echo "no rule to make target"; exit 2;; esac')
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM x\nRUN make\n")
    one = store(tmp_path)
    with pytest.raises(ImageError, match=r"building .*/context/Dockerfile failed: STEP 2/2: RUN make\nno rule to make target"):
        one.get(WantedImage(context=str(context)))
    assert left(one) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: root only")
def test_a_disk_that_fills_up(tmp_path: Path):
    """A real one, of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    oci = write_oci(tmp_path / "oci", [layer(("small", b"x")), layer(("large", os.urandom(3 << 20)))])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        one = ImageStore(SandboxConfig(store=str(disk / "store")))
        with pytest.raises(ImageError, match=r"no space left on the disk of the store \(sandbox\.store\)"):
            one.get(WantedImage(f"oci:{oci}"))
        assert left(one) == []
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(disk), 2)


@pytest.mark.skipif(shutil.which("podman") is None or os.geteuid() != 0, reason="needs podman, and images of its own: root")
def test_podman_builds_a_dockerfile(tmp_path: Path):
    """Without a step that runs: what podman needs for one differs from machine to machine."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "file.txt").write_text("copied")
    (context / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\nCOPY file.txt .\nENV A=1\nUSER 12:34\n")
    one = store(tmp_path)
    image = one.get(WantedImage(context=str(context)))
    assert Path(image.root, "app", "file.txt").read_text() == "copied"
    assert (image.workdir, image.user.uid, image.user.gid, image.env["A"]) == ("/app", 12, 34, "1")
    (context / "Dockerfile").write_text("FROM scratch\nCOPY missing.txt .\n")
    with pytest.raises(ImageError, match=r"building .* failed: [\s\S]*missing\.txt"):
        one.get(WantedImage(context=str(context)))
    said = subprocess.run(["podman", "images", "--format", "{{.Names}}"], capture_output=True, text=True, check=True).stdout
    assert "qwengyre-build" not in said
