"""Build the C kernels once per machine and load them; None where there is no compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("qwen3.c")
MARCH = "QWENGYRE_MARCH"
"""Environment variable: what the compiler's -march is given. Unset, it is `native`: the binary is for this processor alone."""
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_DEADLINE_S = 120  # one file: a compiler that takes longer hangs


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if need be. None, and one log line that says why, when they cannot be."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        log.warning(
            "native_kernels_missing", extra={"reason": "no C compiler (cc, gcc, clang) on PATH; torch serves instead, slower"}
        )
        return None
    try:
        built = _cache_dir() / f"qwen3-{_key(compiler)}.so"
        if not built.exists():
            _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("native_kernels_missing", extra={"reason": f"{compiler}: {detail}"})
        return None


def _compile(compiler: str, path: Path) -> None:
    """Compile beside `path` and rename, so that processes that start together never load half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *_flags(), "-o", str(built), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
        os.replace(built, path)


def _flags() -> tuple[str, ...]:
    return (f"-march={os.environ.get(MARCH, 'native')}", *FLAGS)


def _key(compiler: str) -> str:
    """What the binary depends on: source, flags, compiler, and the processor that `native` stands for."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    text = "\n".join([SOURCE.read_text(), *_flags(), compiler, platform.machine(), processor])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cache_dir() -> Path:
    """Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "qwengyre" / "native"
