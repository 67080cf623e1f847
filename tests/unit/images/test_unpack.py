"""Layers are folders in the end, and a hostile one is refused by name and harms nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
from pathlib import Path

import pytest

from qwengyre.core.errors import ImageError
from qwengyre.images.unpack import Bounds, Unpacker
from qwengyre.testing.images import layer, special

BOUNDS = Bounds(num_bytes=1_000_000, num_entries=100)


def unpack(folder: Path, *layers: bytes, bounds: Bounds = BOUNDS) -> Unpacker:
    import hashlib

    root = folder / "outer" / "root"
    root.mkdir(parents=True)
    unpacker = Unpacker(root, bounds)
    try:
        for number, one in enumerate(layers):
            plain = gzip.decompress(one) if one.startswith(b"\x1f\x8b") else one
            unpacker.apply(io.BytesIO(one), str(number), f"sha256:{hashlib.sha256(plain).hexdigest()}")
    finally:
        unpacker.close()
    return unpacker


def tree(folder: Path) -> dict[str, object]:
    """Every path below the root: contents, the target of a link, None for a folder."""
    root = folder / "outer" / "root"
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_later_layers_lie_over_earlier_ones(tmp_path: Path):
    first = layer(("./a", b"old"), ("b/c", b"kept"), ("/d", b"absolute names begin at the root"), ("e", "a"))
    second = layer(("a", b"new"), ("b", None))
    unpack(tmp_path, first, second)
    assert tree(tmp_path) == {
        "a": b"new",
        "b": None,
        "b/c": b"kept",
        "d": b"absolute names begin at the root",
        "e": "-> a",
    }


def test_a_layer_removes_what_lower_ones_hold_but_nothing_of_its_own(tmp_path: Path):
    first = layer(("gone", b""), ("folder/x", b"low"), ("folder/inner/y", b"low"), ("whole/z/zz", b""))
    second = layer(
        (".wh.gone", b""), ("folder/new", b""), ("folder/inner/mine", b""), ("folder/.wh..wh..opq", b""), (".wh.whole", b"")
    )
    unpack(tmp_path, first, second)
    assert tree(tmp_path) == {"folder": None, "folder/new": b"", "folder/inner": None, "folder/inner/mine": b""}


def test_a_name_through_a_link_lands_where_it_leads_in_the_image(tmp_path: Path):
    (tmp_path / "outer").mkdir()
    unpack(tmp_path, layer(("usr/bin", None), ("bin", "/usr/bin"), ("bin/tool", b"x"), ("up", "../../.."), ("up/f", b"y")))
    assert tree(tmp_path) == {
        "usr": None,
        "usr/bin": None,
        "usr/bin/tool": b"x",
        "bin": "-> /usr/bin",
        "up": "-> ../../..",
        "f": b"y",
    }
    assert sorted(path.name for path in (tmp_path / "outer").iterdir()) == ["root"]


def test_a_kind_may_change_from_layer_to_layer(tmp_path: Path):
    first = layer(("a", None), ("a/b", b""), ("c", b"file"), ("d", "/etc"))
    unpack(tmp_path, first, layer(("a", b"now a file"), ("c", None), ("d", None), ("d/inner", b"")))
    assert tree(tmp_path) == {"a": b"now a file", "c": None, "d": None, "d/inner": b""}


def test_hard_links_stay_inside(tmp_path: Path):
    (tmp_path / "secret").write_text("of the machine")
    unpack(tmp_path, layer(("a", b"1"), special("b", tarfile.LNKTYPE, link="a")))
    root = tmp_path / "outer" / "root"
    assert (root / "a").stat().st_ino == (root / "b").stat().st_ino
    for target in (str(tmp_path / "secret"), "missing"):
        with pytest.raises(ImageError, match=r"not a file of the image|No such file"):
            unpack(tmp_path / target.replace("/", "-"), layer(special("b", tarfile.LNKTYPE, link=target)))


def test_nobody_gains_power_by_a_file_of_an_image(tmp_path: Path):
    unpack(tmp_path, layer(special("su", tarfile.REGTYPE, mode=0o6755, size=3), special("d", tarfile.DIRTYPE, mode=0o7000)))
    root = tmp_path / "outer" / "root"
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o700
    assert (root / "su").stat().st_uid == os.geteuid()


def test_times_stay_as_they_were(tmp_path: Path):
    header = special("module.py", tarfile.REGTYPE, size=1)
    header.mtime = 1_600_000_000
    unpack(tmp_path, layer(header))
    assert (tmp_path / "outer" / "root" / "module.py").stat().st_mtime == 1_600_000_000


def test_devices_of_dev_and_pipes_are_left_out(tmp_path: Path):
    made = unpack(tmp_path, layer(special("dev/sda", tarfile.BLKTYPE), special("run/pipe", tarfile.FIFOTYPE), ("a", b"")))
    assert tree(tmp_path) == {"dev": None, "run": None, "a": b""}
    assert made.done.left_out == 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("../x", b"")], "leads out of the image"),
        ([("a/../../x", b"")], "leads out of the image"),
        ([special("x", tarfile.LNKTYPE, link="../../secret")], "leads out of the image"),
        ([special("data/sda", tarfile.BLKTYPE)], "a device outside of /dev"),
        ([special("data/null", tarfile.CHRTYPE)], "a device outside of /dev"),
        ([("/".join("d" * 200), b"")], "folders deep"),
        ([("d" * 300, b"")], "cannot be unpacked: .*name too long"),
        ([(".wh...", b"")], "not a name"),
        ([("a", b""), ("a/b", b"")], "Not a directory"),
    ],
)
def test_a_hostile_layer_is_refused_by_name(tmp_path: Path, entries: list, message: str):
    with pytest.raises(ImageError, match=message):
        unpack(tmp_path, layer(*entries))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outer"]
    assert sorted(path.name for path in (tmp_path / "outer").iterdir()) == ["root"]


def test_a_bomb_is_refused_before_it_is_on_the_disk(tmp_path: Path):
    bounds = Bounds(num_bytes=10_000, num_entries=100)
    with pytest.raises(ImageError, match=r"max_image_mb"):
        unpack(tmp_path, gzip.compress(layer(("a", bytes(20_000)))), bounds=bounds)
    assert tree(tmp_path) == {}
    sparse = special("hole", tarfile.REGTYPE)
    sparse.size = 2**60
    with pytest.raises(ImageError, match="max_image_mb"):
        unpack(tmp_path / "2", layer(("x", b""))[:0] + sparse.tobuf() + bytes(10240), bounds=bounds)


def test_too_many_files_are_refused(tmp_path: Path):
    with pytest.raises(ImageError, match="more than 3 files"):
        unpack(tmp_path, layer(*((str(n), b"") for n in range(4))), bounds=Bounds(1000, 3))


def test_a_header_is_not_held_whatever_its_size(tmp_path: Path):
    header = special("pax", b"x")
    header.size = 2**32
    with pytest.raises(ImageError, match="a header of more than"):
        unpack(tmp_path, header.tobuf(tarfile.USTAR_FORMAT) + bytes(10240), bounds=Bounds(2**40, 100))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_layers_may_be_compressed(tmp_path: Path, compress):
    import hashlib

    plain = layer(("a", b"x"))
    (tmp_path / "r").mkdir()
    unpacker = Unpacker(tmp_path / "r", BOUNDS)
    unpacker.apply(io.BytesIO(compress(plain)), "0", f"sha256:{hashlib.sha256(plain).hexdigest()}")
    unpacker.close()
    assert (tmp_path / "r" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("damage", [lambda data: data[:700], lambda data: data[:-3], lambda data: b"\x1f\x8b" + data, bytes])
def test_a_damaged_layer_is_named(tmp_path: Path, damage):
    packed = gzip.compress(layer(("a", bytes(range(256)) * 40)))
    (tmp_path / "r").mkdir()
    unpacker = Unpacker(tmp_path / "r", BOUNDS)
    with pytest.raises(ImageError, match="layer 0 "):
        unpacker.apply(io.BytesIO(damage(packed) if damage is not bytes else b""), "0", "sha256:" + "0" * 64)
    unpacker.close()


def test_zstd_is_refused_with_what_to_do(tmp_path: Path):
    (tmp_path / "r").mkdir()
    unpacker = Unpacker(tmp_path / "r", BOUNDS)
    with pytest.raises(ImageError, match="skopeo copy"):
        unpacker.apply(io.BytesIO(b"\x28\xb5\x2f\xfd" + bytes(100)), "0", "sha256:" + "0" * 64)
    unpacker.close()
