"""`warm_up`: the cached model of a configuration, made in a process of its own when it is not there yet."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

import qwengyre
import qwengyre_harness
from qwengyre.core.errors import WarmupFailed
from qwengyre.warmup.config import WarmupConfig

_SOURCES = ("warmup/*.py", "sandbox/families/mini_repositories.py")
_HARNESS_SOURCES = ("agent.py", "tools.py")
_LIBRARIES = ("torch", "transformers", "tokenizers", "renderers", "numpy")
_LAST_LINES = 5


def warm_up(config: WarmupConfig, cache: Path, seed: int, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the warmed-up model and its tokenizer (Hugging Face format), training it if `cache` lacks it.

    The folder's name is a digest of all that determines the model: configuration, seed, sources, library versions. `progress`
    is told a line now and then. torch is imported in a child process only. Raises WarmupFailed.
    """
    folder = warmed_up(config, Path(cache), seed)
    if (folder / "model.safetensors").exists():
        progress(f"warm-up: found in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        _train(config, seed, unfinished, progress)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def warmed_up(config: WarmupConfig, cache: Path, seed: int) -> Path:
    """Where `warm_up` puts the model of this configuration, whether it is there or not."""
    return cache / "policies" / digest(config, seed)


def digest(config: WarmupConfig, seed: int) -> str:
    state = hashlib.sha256(msgspec.json.encode([config, seed]))
    package, harness = Path(qwengyre.__file__).parent, Path(qwengyre_harness.__file__).parent
    files = [path for pattern in _SOURCES for path in sorted(package.glob(pattern))]
    for path in [*files, *(harness / name for name in _HARNESS_SOURCES)]:
        state.update(path.read_bytes())
    for library in _LIBRARIES:
        state.update(f"{library}={importlib.metadata.version(library)};".encode())
    return state.hexdigest()[:20]


def _train(config: WarmupConfig, seed: int, folder: Path, progress: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "qwengyre.warmup", str(folder), str(seed), msgspec.json.encode(config).decode()]
    environment = os.environ | {"OMP_NUM_THREADS": str(config.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines = [*lines[1 - _LAST_LINES :], line.rstrip()]
                if line.startswith("warm-up"):
                    progress(line.rstrip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise WarmupFailed(process.returncode, "\n".join(lines))


def _publish(unfinished: Path, folder: Path) -> None:
    """Move into place at once; whoever was faster has made the same model."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").exists():
            raise
