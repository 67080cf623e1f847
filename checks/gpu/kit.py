"""`make gpu-kit`: the checkout and the wheels that a bare box lacks, as one archive. Needs a package index, once, here.

The box has torch, transformers and pip, and what these need (`GIVEN`); the kit brings the rest for the Pythons of `PYTHONS` on Linux x86-64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
NAME: Final = "qwengyre-gpu-kit"
PYTHONS: Final = ("3.11", "3.12", "3.13")
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES: Final = 60_000_000
GIVEN: Final = frozenset(
    {
        *("filelock", "fsspec", "hf-xet", "huggingface-hub", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "packaging"),
        *("pyyaml", "regex", "safetensors", "setuptools", "sympy", "tokenizers", "torch", "tqdm", "transformers"),
        "typing-extensions",
    }
)
"""torch, transformers, and what each of their releases that we take needs."""
NOT_NEEDED: Final = frozenset({"pyarrow", "tensorboard"})
"""For exports and for looking at event files: no check of the kit has them."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m checks.gpu.kit", description=__doc__)
    parser.add_argument("out", type=Path, help=f"the archive, such as {NAME}.tar.gz")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="of the box; may be repeated; all when left out")
    options = parser.parse_args(arguments)
    out: Path = options.out
    wanted = requirements()
    with tempfile.TemporaryDirectory() as scratch:
        for python in options.python or PYTHONS:
            download([f"{name}=={importlib.metadata.version(name)}" for name in missing(wanted)], python, Path(scratch))
        wheels = sorted(Path(scratch).iterdir())
        num_bytes = pack(out, wheels, "\n".join(map(str, wanted)) + "\n")
    print(f"{out}: {num_bytes / 1e6:.1f} MB, {len(wheels)} wheels")
    if num_bytes > MOST_BYTES:
        sys.exit(f"{out} is larger than {MOST_BYTES / 1e6:.0f} MB: see what it holds with `tar tvf {out}`")


def requirements() -> list[Requirement]:
    """Of the project and of its tests, without what the box has and what no check needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["test"]])
    return [one for one in listed if canonical(one.name) not in GIVEN | NOT_NEEDED]


def missing(wanted: list[Requirement]) -> list[str]:
    """The distributions that `wanted` needs, by what is installed here, without those of the box."""
    found: set[str] = set()
    todo = list(wanted)
    while todo:
        one = todo.pop()
        name = canonical(one.name)
        if name in found or name in GIVEN | NOT_NEEDED:
            continue
        found.add(name)
        needs = map(Requirement, importlib.metadata.requires(name) or [])
        extras = [*one.extras, ""]
        todo += [need for need in needs if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)]
    return sorted(found)


def canonical(name: str) -> str:
    """
    >>> canonical("Typing_Extensions")
    'typing-extensions'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def download(pins: list[str], python: str, folder: Path) -> None:
    where = [part for platform in PLATFORMS for part in ("--platform", platform)]
    target = ["--only-binary=:all:", "--no-deps", "--python-version", python, "--implementation", "cp", *where]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *target, "--dest", str(folder), *pins], check=True)


def pack(out: Path, wheels: list[Path], wanted: str) -> int:
    """Bytes of the archive. Tracked files as they are in the work tree, under one folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tarfile.open(out, "w:gz", compresslevel=6) as archive:
        for name in filter(None, listed.split("\0")):
            archive.add(ROOT / name, f"{NAME}/{name}", recursive=False)
        for wheel in wheels:
            archive.add(wheel, f"{NAME}/wheels/{wheel.name}")
        entry = tarfile.TarInfo(f"{NAME}/wheels/requirements.txt")
        entry.size = len(wanted.encode())
        archive.addfile(entry, io.BytesIO(wanted.encode()))
    return out.stat().st_size


if __name__ == "__main__":
    main(sys.argv[1:])
