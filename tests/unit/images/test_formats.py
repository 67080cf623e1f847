"""Images on disk, whoever wrote them; what cannot be the image that was meant is refused by name."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from qwengyre.core.errors import ImageError
from qwengyre.images.formats import stored_image
from qwengyre.images.reference import ImagePlace, Reference, parse_reference
from qwengyre.testing.images import layer, layer_of_folder, write_docker_archive, write_oci

LAYERS = (layer(("a", b"1")), layer(("b", b"2")))


def archived(folder: Path) -> Path:
    path = folder.with_suffix(".tar")
    path.write_bytes(layer_of_folder(folder))
    return path


def test_one_image_is_the_same_in_every_format(tmp_path: Path):
    oci = write_oci(tmp_path / "oci", LAYERS, Env=["A=1"])
    places = [Reference(ImagePlace.FOLDER, str(oci)), Reference(ImagePlace.ARCHIVE, str(archived(oci)))]
    places.append(Reference(ImagePlace.ARCHIVE, str(write_docker_archive(tmp_path / "docker.tar", LAYERS, Env=["A=1"]))))
    found = []
    for place in places:
        with stored_image(place) as image:
            for one in image.layers:
                with one.open() as content:
                    assert content.read()
            found.append((image.digest, image.config["config"], [one.diff_id for one in image.layers]))
    assert found[0] == found[1] == found[2]


def test_a_tag_chooses_among_several(tmp_path: Path):
    oci = write_oci(tmp_path / "oci", LAYERS[:1], tag="one")
    write_oci(oci, LAYERS[1:], tag="example.org/name:two")
    for tag, content in (("one", LAYERS[0]), ("two", LAYERS[1])):
        with stored_image(parse_reference(f"oci:{oci}:{tag}")) as image:
            assert len(image.layers) == 1
            assert image.layers[0].diff_id == write_digest(content)
    for wrong, message in ((f"oci:{oci}", r"2 images .*one.*two"), (f"oci:{oci}:three", "no image three")):
        with pytest.raises(ImageError, match=message), stored_image(parse_reference(wrong)):
            pass


def write_digest(data: bytes) -> str:
    import hashlib

    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def damage_config(folder: Path) -> None:
    manifest = json.loads(blob(folder, json.loads((folder / "index.json").read_text())["manifests"][0]).read_text())
    blob(folder, manifest["config"]).write_text('{"rootfs": {"diff_ids": []}}')


def blob(folder: Path, descriptor: dict) -> Path:
    return folder / "blobs" / "sha256" / descriptor["digest"].partition(":")[2]


def with_index(text: str):
    return lambda folder: (folder / "index.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage_config, "does not have the digest"),
        (with_index("{}"), "no list of manifests"),
        (with_index("[1]"), "not a JSON object"),
        (with_index("{" * 100_000), "damaged"),
        (with_index('{"manifests": [{"digest": "sha256:../../../secret"}]}'), "is not a digest"),
        (with_index('{"manifests": [{"digest": "sha256:%s"}]}' % ("0" * 64)), "holds no blobs"),
        (lambda folder: (folder / "index.json").unlink(), "neither index.json"),
    ],
)
def test_a_damaged_layout_is_named(tmp_path: Path, change, message: str):
    folder = write_oci(tmp_path / "oci", LAYERS)
    change(folder)
    with pytest.raises(ImageError, match=message), stored_image(Reference(ImagePlace.FOLDER, str(folder))):
        pass


def test_an_index_of_itself_ends(tmp_path: Path):
    folder = write_oci(tmp_path / "oci", LAYERS)
    digest = write_digest(b"x")
    nested = {"manifests": [{"digest": digest, "mediaType": "application/vnd.oci.image.index.v1+json"}]}
    (folder / "index.json").write_text(json.dumps(nested))
    (folder / "blobs" / "sha256" / digest.partition(":")[2]).write_text(json.dumps(nested))
    with pytest.raises(ImageError), stored_image(Reference(ImagePlace.FOLDER, str(folder))):
        pass


def test_another_machine_s_image_is_refused(tmp_path: Path):
    folder = write_oci(tmp_path / "oci", LAYERS, architecture="riscv64")
    with pytest.raises(ImageError, match="is for linux on riscv64"), stored_image(Reference(ImagePlace.FOLDER, str(folder))):
        pass


def test_what_is_not_an_image_is_named(tmp_path: Path):
    (tmp_path / "text.tar").write_text("hello")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    for name, message in (("text.tar", "is not an archive"), ("empty.tar", "neither index.json"), ("none.tar", "does not exist")):
        with pytest.raises(ImageError, match=message), stored_image(Reference(ImagePlace.ARCHIVE, str(tmp_path / name))):
            pass


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("python:3.12-slim", ImagePlace.REGISTRY, "docker.io/library/python:3.12-slim"),
        ("me/agent", ImagePlace.REGISTRY, "docker.io/me/agent"),
        ("ghcr.io/a/b@sha256:" + "0" * 64, ImagePlace.REGISTRY, "ghcr.io/a/b@sha256:" + "0" * 64),
        ("127.0.0.1:5000/base:1", ImagePlace.REGISTRY, "127.0.0.1:5000/base:1"),
        ("registry:5000/base:1", ImagePlace.REGISTRY, "registry:5000/base:1"),
        ("docker://example.org/x", ImagePlace.REGISTRY, "example.org/x"),
        ("localhost/base:1", ImagePlace.LOCAL, "localhost/base:1"),
        ("/images/base.tar", ImagePlace.ARCHIVE, "/images/base.tar"),
        ("../layout", ImagePlace.FOLDER, "../layout"),
    ],
)
def test_references(text: str, place: ImagePlace, name: str):
    found = parse_reference(text)
    assert (found.place, found.name) == (place, name)


@pytest.mark.parametrize("text", ["", "UPPER", "a b", "oci:", "--option", "docker://--x", "a:$(id)", "-v", "x@sha256:12"])
def test_what_is_not_a_reference_is_refused(text: str):
    with pytest.raises(ImageError):
        parse_reference(text)
