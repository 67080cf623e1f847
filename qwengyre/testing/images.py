"""Small container images, made without a registry: OCI layouts and archives with whatever layers a test wants."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qwengyre.images.formats import MACHINES, REF_NAME

Entry = tuple[str, bytes | str | None] | tarfile.TarInfo
"""Name with the contents of a file, the target of a link, or None for a folder; or any header."""


def layer(*entries: Entry, mode: int = 0o755) -> bytes:
    """An uncompressed layer."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry, io.BytesIO(bytes(entry.size)) if entry.isreg() else None)
                continue
            name, content = entry
            header = tarfile.TarInfo(name)
            header.mode = mode
            if content is None:
                header.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                header.type, header.linkname = tarfile.SYMTYPE, content
            else:
                header.size = len(content)
            archive.addfile(header, io.BytesIO(content) if isinstance(content, bytes) else None)
    return made.getvalue()


def special(name: str, kind: bytes, *, link: str = "", mode: int = 0o644, size: int = 0) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode, header.size = kind, link, mode, size
    return header


def layer_of_folder(root: Path) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(root, ".", filter=_of_nobody)
    return made.getvalue()


def _of_nobody(header: tarfile.TarInfo) -> tarfile.TarInfo:
    header.uid = header.gid = 0
    header.uname = header.gname = ""
    return header


def write_oci(
    folder: Path,
    layers: Sequence[bytes],
    *,
    tag: str = "",
    compress: Callable[[bytes], bytes] = gzip.compress,
    diff_ids: Sequence[str] | None = None,
    architecture: str = MACHINES.get(platform.machine(), platform.machine()),
    **config: Any,
) -> Path:
    """An OCI layout in `folder`; what is given by name is the image's configuration (`Env`, `WorkingDir`, `User` ...)."""
    (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    ids = list(diff_ids) if diff_ids is not None else [_digest(one) for one in layers]
    document = {"architecture": architecture, "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": ids}}
    described = [_blob(folder, compress(one), "application/vnd.oci.image.layer.v1.tar+gzip") for one in layers]
    manifest = {
        "schemaVersion": 2,
        "config": _blob(folder, json.dumps(document).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    entry = _blob(folder, json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    index = folder / "index.json"
    others = json.loads(index.read_text())["manifests"] if index.exists() else []
    entry |= {"annotations": {REF_NAME: tag}} if tag else {}
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*others, entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def write_docker_archive(path: Path, layers: Sequence[bytes], **config: Any) -> Path:
    """What `docker save` writes."""
    ids = [_digest(one) for one in layers]
    document = {"architecture": MACHINES.get(platform.machine(), ""), "os": "linux", "config": config}
    document["rootfs"] = {"type": "layers", "diff_ids": ids}
    names = [f"{one.partition(':')[2]}/layer.tar" for one in ids]
    files = dict(zip(names, layers, strict=True)) | {"config.json": json.dumps(document).encode()}
    files["manifest.json"] = json.dumps([{"Config": "config.json", "RepoTags": ["made:1"], "Layers": names}]).encode()
    path.write_bytes(layer(*files.items()))
    return path


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _blob(folder: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = _digest(data)
    (folder / "blobs" / "sha256" / digest.partition(":")[2]).write_bytes(data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def small_root(
    folder: Path, programs: Iterable[str] = ("bash", "sh", "cat", "ls", "mkdir", "id", "sleep", "touch", "rm")
) -> Path:
    """A root file system with a few programs of this machine and the libraries that they are linked with, nothing else.

    What is named by its path lies at the same path, others in /bin.
    """
    for name in ("bin", "etc", "root", "tmp", "usr/bin", "app", "dev", "proc"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "root").chmod(0o700)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nworker:x:4711:4712::/home/worker:/bin/bash\n")
    (folder / "etc" / "group").write_text("root:x:0:\nworker:x:4712:\n")
    for program in programs:
        path = program if program.startswith("/") else shutil.which(program, path="/bin:/usr/bin")
        assert path is not None, program
        _copy(path, folder / (path.lstrip("/") if path == program else f"bin/{program}"))
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(?:=> )?(/\S+) \(0x", said):
            _copy(library, folder / library.lstrip("/"))
    return folder


def _copy(source: str, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(os.path.realpath(source), target)
        target.chmod(0o755)
