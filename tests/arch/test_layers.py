"""The folders of the package stand in layers: each imports from those below it, never from above, and so in no circle."""

from __future__ import annotations

import re

from tests.arch.source import ROOT, Module, expect_none, imported, modules

LAYERS = (
    ("core",),
    ("journal", "rpc", "trajectory", "models", "images"),
    ("transfer", "buffer", "config", "telemetry"),
    ("engines", "scheduler", "trainer", "sandbox"),
    ("gateway", "paced", "warmup", "sim", "hooks"),
    ("cell",),
    ("launchers", "testing"),
    ("runtime", "doctor"),
    ("recorded",),
    ("dashboard",),
    ("tracking",),
    ("cli",),
    ("bench",),
)
"""From below. What stands in one layer does not know one another."""
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}


def folder_of(path: tuple[str, ...]) -> str:
    return path[1] if len(path) > 2 else ""


def imports_of(module: Module) -> list[tuple[int, str]]:
    """(line, folder of the package) of all imports, also of those for type checking and inside of functions."""
    return [(line, name.split(".")[1]) for line, name in imported(module) if name.startswith("qwengyre.")]


def test_every_folder_has_its_layer():
    assert {path.name for path in (ROOT / "qwengyre").iterdir() if (path / "__init__.py").exists()} == set(LEVEL)


def test_imports_only_go_down():
    found = []
    for module in modules("qwengyre"):
        folder = folder_of(module.path.parts)
        for line, to in imports_of(module):
            if folder and to in LEVEL and to != folder and LEVEL[to] >= LEVEL[folder]:
                found.append(f"{module.path}:{line}: {folder} imports {to}, which is not below it")
    expect_none(found)


def test_the_rest_of_the_world_is_imported_by_nobody():
    """The small harness of the quickstart runs in a sandbox of its own and knows nothing of the package."""
    expect_none([f"{m.path}:{line} imports {to}" for m in modules("qwengyre_harness") for line, to in imports_of(m)])


def test_architecture_draws_these_layers():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"```layers\n(.*?)```", text, re.DOTALL)
    assert block, "docs/architecture.md draws the layers in a block that is called `layers`"
    drawn = tuple(tuple(re.findall(r"[a-z_]+", line)) for line in reversed(block[1].strip().splitlines()))
    assert drawn == LAYERS
