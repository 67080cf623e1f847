"""Pure folders decide; they touch no clock, file, socket, task, thread, logger, torch or global randomness."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.arch.source import PURE_FOLDERS, dotted, expect_none, imported, pure_modules

IMPURE = frozenset(
    [
        "time",
        "datetime",
        "asyncio",
        "concurrent",
        "threading",
        "multiprocessing",
        "queue",
        "socket",
        "ssl",
        "http",
        "urllib",
        "selectors",
        "signal",
        "subprocess",
        "os",
        "sys",
        "io",
        "pathlib",
        "tempfile",
        "shutil",
        "glob",
        "mmap",
        "fcntl",
        "logging",
        "random",
        "secrets",
        "uuid",
        "torch",
        "transformers",
        "starlette",
        "uvicorn",
        "httpx",
        "rich",
        "typer",
    ]
)
PURE_PARTS = ("urllib.parse",)
"""Of impure packages."""
FORBIDDEN_CALLS = frozenset({"open", "print", "input", "exec", "eval"})
SEEDED = frozenset({"Generator", "SeedSequence", "default_rng", "PCG64", "Philox"})
PURE_PACKAGES = tuple("qwengyre." + folder.replace("/", ".") for folder in PURE_FOLDERS)


def test_pure_folders_import_nothing_impure():
    found = [
        f"{m.path}:{line} imports {name}"
        for m in pure_modules()
        for line, name in imported(m)
        if name.split(".")[0] in IMPURE and not name.startswith(PURE_PARTS)
    ]
    expect_none(found)


def test_pure_folders_import_only_pure_folders_of_ours():
    allowed = (*PURE_PACKAGES, "qwengyre.engines.api", "qwengyre.transfer.api")
    found = [
        f"{m.path}:{line} imports {name}"
        for m in pure_modules()
        for line, name in imported(m)
        if name.startswith("qwengyre.") and not any(name == package or name.startswith(f"{package}.") for package in allowed)
    ]
    expect_none(found)


def test_pure_folders_open_print_and_draw_nothing():
    found = []
    for module in pure_modules():
        for node in module.all_of(ast.Call):
            if impure_call(node):
                found.append(f"{module.path}:{node.lineno} calls {dotted(node.func)}")
    expect_none(found)


def impure_call(call: ast.Call) -> bool:
    """Opens, prints, or draws from a generator that nobody seeded."""
    name = dotted(call.func)
    if name.startswith(("np.random.", "numpy.random.")):
        return name.split(".")[-1] not in SEEDED or not (call.args or call.keywords)
    return name in FORBIDDEN_CALLS


LIGHT = (
    "qwengyre.cli.main",
    "qwengyre.runtime.run_config",
    "qwengyre.telemetry.metrics",
    "qwengyre.dashboard.report",
    "qwengyre.scheduler.scheduler",
)


def test_what_starts_often_or_first_imports_no_torch():
    code = f"import importlib, sys\nfor name in {LIGHT!r}: importlib.import_module(name)\nprint([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
