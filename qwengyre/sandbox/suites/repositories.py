"""Suites that are folders: the first Terminal-Bench, and NL2RepoBench."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import yaml

from qwengyre.core.errors import ConfigError
from qwengyre.images.config import SandboxConfig
from qwengyre.images.store import ImageStore
from qwengyre.images.wanted import WantedImage
from qwengyre.sandbox.suites.folders import JUDGE_HEAD, ImportedTask

OF_TASK: Final = frozenset({"task.yaml", "tests", "run-tests.sh", "solution.sh", "solution.yaml", "docker-compose.yaml"})
"""Of a folder of the first Terminal-Bench: everything else is what its Dockerfile may copy."""
NEEDS_NETWORK: Final = re.compile(
    r"^[^#\n]*\b(curl|wget|apt-get|apt|pip3? install|uv (?:pip|add|sync|run|venv)|npm install)\b", re.MULTILINE
)
BY_EXIT_CODE: Final = JUDGE_HEAD + ('if [ "$code" = 0 ]; then echo 1; else echo 0; fi > "$VERIFIER_DIR/reward.txt"\n')
RUN_OF_SUITE: Final = 'export TEST_DIR="$TESTS_DIR"\nexec bash "$TESTS_DIR/run-tests.sh"\n'


def terminal_bench(root: Path) -> Iterator[ImportedTask]:
    """Folders with task.yaml, Dockerfile, run-tests.sh and tests/. The score is 1 if run-tests.sh ends with 0. Raises ConfigError."""
    for description in sorted(root.rglob("task.yaml")):
        folder = description.parent
        try:
            document = yaml.safe_load(description.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"not YAML: {' '.join(str(error).split())}", file=str(description)) from None
        if not isinstance(document, dict) or not isinstance(document.get("instruction"), str):
            raise ConfigError("has no instruction", file=str(description))
        script = folder / "run-tests.sh"
        if not script.is_file():
            raise ConfigError("missing: it scores the task", file=str(script))
        copied = [(str(path), f"environment/{path.name}") for path in sorted(folder.iterdir()) if path.name not in OF_TASK]
        copied += [(str(folder / name), f"tests/{to}") for name, to in (("tests", ""), ("run-tests.sh", "run-tests.sh"))]
        compose = folder / "docker-compose.yaml"
        copied += [(str(compose), "environment/docker-compose.yaml")] if compose.is_file() else []
        copied += [(str(folder / "solution.sh"), "solution/solve.sh")] if (folder / "solution.sh").is_file() else []
        found = NEEDS_NETWORK.search(script.read_text(encoding="utf-8", errors="replace"))
        warning = (
            f"run-tests.sh uses {found[1]}, and there is no network while a task is scored: install it in the Dockerfile"
            if found
            else ""
        )
        yield ImportedTask(
            folder.name,
            document["instruction"],
            {"tests/test.sh": BY_EXIT_CODE, "tests/run.sh": RUN_OF_SUITE},
            timeout_s=_seconds(document, "max_agent_timeout_sec", description),
            verifier_timeout_s=_seconds(document, "max_test_timeout_sec", description),
            copied=tuple(pair for pair in copied if Path(pair[0]).exists()),
            warnings=(warning,) if warning else (),
        )


def _seconds(document: dict[str, object], key: str, path: Path) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"must be a number of seconds, not {value!r:.40}", file=str(path), key=key)
    return float(value)


NL2REPO_IMAGE: Final = "ghcr.io/multimodal-art-projection/nl2repobench/{name}:1.0"
PASSED: Final = '''\
"""The fraction of the suite's tests that passed, as pytest counts them in its last line."""
import os, re

here = os.path.dirname(os.path.abspath(__file__))
total = int(open(os.path.join(here, "test_case_count.txt")).read())
with open(os.path.join(os.environ.get("TMPDIR", "/tmp"), "test-output.txt"), errors="replace") as file:
    counts = re.findall(r"^=* ?.*?\\b(\\d+) passed\\b.* in [0-9.]+", file.read(), re.MULTILINE)
print(min(1.0, int(counts[-1]) / total) if counts else 0.0)
'''
NL2REPO_TEST: Final = JUDGE_HEAD + 'python3 -I -S "$TESTS_DIR/judge.py" > "$VERIFIER_DIR/reward.txt"\n'
NL2REPO_DOCKERFILE: Final = """\
FROM {image}
WORKDIR {workdir}
RUN find {workdir} -mindepth 1 -delete
"""


def nl2repo(root: Path, sandbox: SandboxConfig, image: str = NL2REPO_IMAGE) -> Iterator[ImportedTask]:
    """Folders `test_files/NAME` with start.md, test_commands.json, test_files.json and test_case_count.txt.

    The suite's image of a task holds its tests, which a harness must not see: they are taken out of it into the task's tests/, and the task runs
    on what is left. So images are needed when it is imported. Raises ConfigError and ImageError.
    """
    store = ImageStore(sandbox)
    for start in sorted(root.rglob("start.md")):
        folder, name = start.parent, start.parent.name
        commands, hidden = (_texts(folder / file) for file in ("test_commands.json", "test_files.json"))
        count = folder / "test_case_count.txt"
        if not count.is_file() or not count.read_text().strip().isdigit():
            raise ConfigError("must hold the number of tests", file=str(count))
        named = image.format(name=name.lower())
        unpacked = store.get(WantedImage(named))
        copied = []
        for path in hidden:
            source = Path(unpacked.root + unpacked.workdir, path)
            if ".." in Path(path).parts or path.startswith("/") or not source.exists():
                raise ConfigError(f"{path} is not in {unpacked.workdir} of {named}", file=str(folder / "test_files.json"))
            copied.append((str(source), f"tests/hidden/{path}"))
        restore = 'for name in "$TESTS_DIR"/hidden/*; do rm -rf "./${name##*/}"; done\ncp -r "$TESTS_DIR"/hidden/. .\n'
        files = {
            "environment/Dockerfile": NL2REPO_DOCKERFILE.format(image=named, workdir=unpacked.workdir),
            "tests/test.sh": NL2REPO_TEST,
            "tests/run.sh": restore + "\n".join(commands) + "\n",
            "tests/judge.py": PASSED,
            "tests/test_case_count.txt": count.read_text(),
        }
        offline = [one for one in commands if NEEDS_NETWORK.search(one) and "pip install -e" not in one]
        warnings = tuple(f"`{one}` needs a network, which there is not while a task is scored" for one in offline)
        yield ImportedTask(
            name,
            start.read_text(encoding="utf-8"),
            files,
            timeout_s=14400.0,
            verifier_timeout_s=3600.0,
            copied=tuple(copied),
            warnings=warnings,
        )


def _texts(path: Path) -> list[str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[str])
    except FileNotFoundError:
        raise ConfigError("missing", file=str(path)) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a list of texts: {error}", file=str(path)) from None
