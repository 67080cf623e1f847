"""Run the checks of a device on a bare box, from an unpacked kit: `python3 -m checks.gpu.run [--device cuda|cpu] [--out FOLDER]`.

Of the standard library. What the box's Python lacks is installed from `wheels/` into `.box`, an environment that sees the box's own
packages: nothing is fetched, and the box's environment stays as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS, BOX = ROOT / "wheels", ROOT / ".box"
LEAST = {"torch": (2, 11), "transformers": (5, 16)}
CHECKS = ("checks/gpu", "tests/contract/test_engines.py", "tests/contract/test_trainers.py", "tests/contract/test_transfer.py")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m checks.gpu.run", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the half that needs no device")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder for the log and the figures")
    parser.add_argument("--here", action="store_true", help="with this Python, which has everything: no kit")
    parser.add_argument("checks", nargs="*", help="of pytest, instead of all; `bench` is `qwengyre bench device`")
    options = parser.parse_args(arguments)
    refuse_old()
    python, out = Path(sys.executable) if options.here else environment(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    env = os.environ | {
        "QWENGYRE_TEST_DEVICE": options.device,
        "QWENGYRE_GPU_REPORT": str(out / "gpu-report.json"),
        "PYTHONUNBUFFERED": "1",
    }
    wanted = options.checks or [*CHECKS, "bench"]
    codes = []
    if chosen := [check for check in wanted if check != "bench"]:
        command = [str(python), "-m", "pytest", "-rs", "--durations=15", "-p", "no:cacheprovider", *chosen]
        codes.append(subprocess.run(command, cwd=ROOT, env=env, check=False).returncode)
    if "bench" in wanted:
        size = "full" if options.device == "cuda" else "small"
        bench = ["bench", "device", "--device", options.device, "--size", size, "--json", str(out / "bench-device.json")]
        program = "from qwengyre.cli.main import main; main()"
        codes.append(subprocess.run([str(python), "-c", program, *bench], cwd=ROOT, env=env, check=False).returncode)
    return max(codes)


def refuse_old() -> None:
    for name, least in LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            sys.exit(f"this Python ({sys.executable}) has no {name}: run the kit with the one that has it")
        if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < least:
            sys.exit(f"{name} {found} is too old: the kit needs {'.'.join(map(str, least))} or newer")


def environment() -> Path:
    """The Python of `.box`, made once."""
    python = BOX / "bin" / "python"
    if (BOX / ".done").exists():
        return python
    venv.create(BOX, with_pip=False, clear=True)
    site = Path(subprocess.run([python, "-c", SITE], check=True, capture_output=True, text=True).stdout.strip())
    own = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    own += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "box.pth").write_text("\n".join([str(ROOT), *dict.fromkeys(own)]) + "\n")
    install = [
        "install",
        "--quiet",
        "--no-compile",
        "--no-index",
        "--find-links",
        str(WHEELS),
        "--requirement",
        str(WHEELS / "requirements.txt"),
    ]
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, *install], check=True)
    (BOX / ".done").touch()
    return python


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
