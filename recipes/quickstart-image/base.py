"""Make the base image of `make quickstart-image` of this machine's bash and Python: `python base.py FOLDER`.

With podman it becomes `localhost/qwengyre-quickstart-base`, which the Dockerfile beside this file starts from. Without, the whole image
is put together here, as the Dockerfile would, into FOLDER/oci. The last line says what `sandbox.image` is to be.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from qwengyre.testing.images import layer, layer_of_folder, small_root, write_oci

HERE = Path(__file__).parent
BASE = "localhost/qwengyre-quickstart-base"
PROGRAMS = ("bash", "sh", "cat", "ls", "mkdir", "rm", "chmod", "dirname", "sleep", "grep", "sed", "head", "tail")
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__", "config-*")


def with_python(root: Path) -> None:
    """The Python that this program runs on, at the same place, and as /usr/bin/python3, with what its extension modules are linked with."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    extensions = Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so")
    small_root(root, [*PROGRAMS, python, *(str(module) for module in extensions)])
    library = sysconfig.get_paths()["stdlib"]
    shutil.copytree(
        library, root / library.lstrip("/"), ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True, dirs_exist_ok=True
    )
    (root / "usr/bin/python3").symlink_to(python)


def main(folder: Path) -> None:
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    root = folder / f"root-{recipe}"
    if not (root / "usr/bin/python3").is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
        with_python(root)
    podman = shutil.which("podman")
    if podman is None:
        check = layer(("usr/local/bin/check-work", (HERE / "check-work").read_bytes()))
        shutil.rmtree(folder / "oci", ignore_errors=True)
        write_oci(folder / "oci", [layer_of_folder(root), check], WorkingDir="/app", Env=["PATH=/usr/local/bin:/usr/bin:/bin"])
        print(f"oci:{folder / 'oci'}")
        return
    packed = subprocess.Popen(["tar", "--directory", str(root), "--create", "."], stdout=subprocess.PIPE)
    subprocess.run([podman, "import", "--quiet", "-", BASE], stdin=packed.stdout, stdout=subprocess.DEVNULL, check=True)
    print(f"build:{HERE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
