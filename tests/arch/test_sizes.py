"""House style that a program can see: sizes, names, catch-alls."""

from __future__ import annotations

import ast
import re

from tests.arch.source import dotted, expect_none, modules

MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

PACKAGES = modules("qwengyre", "qwengyre_harness")
FUNCTIONS = [(module, node) for module in PACKAGES for node in module.all_of(ast.FunctionDef, ast.AsyncFunctionDef)]


def test_modules_stay_small():
    expect_none([f"{m.path}: {m.num_lines} lines" for m in PACKAGES if m.num_lines > MAX_MODULE_LINES])


def test_functions_stay_small():
    sizes = [(module.path, node.name, node.end_lineno - node.lineno + 1) for module, node in FUNCTIONS]
    expect_none([f"{path} {name}: {size} lines" for path, name, size in sizes if size > MAX_FUNCTION_LINES])


def test_functions_take_few_parameters():
    """Past six, a record. Exempt: commands (a parameter is an option), builders for tests, and torch's `forward(ctx, ...)`."""
    found = []
    for module, node in FUNCTIONS:
        parameters = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")
        ]
        is_exempt = {"cli", "bench", "testing"} & set(module.path.parts) or parameters[:1] == ["ctx"]
        if len(parameters) > MAX_PARAMETERS and not is_exempt:
            found.append(f"{module.path} {node.name}: {len(parameters)} parameters")
    expect_none(found)


def test_names_say_what_things_are():
    files = [
        str(m.path)
        for m in PACKAGES
        if re.fullmatch(r"(utils?|helpers?|misc|common|stuff)(\.py)?", m.path.name) or "utils" in m.path.parts
    ]
    classes = [
        f"{m.path} {node.name}"
        for m in PACKAGES
        for node in m.all_of(ast.ClassDef)
        if re.search(r"Manager|Helper|Utils?$", node.name)
    ]
    expect_none(files + classes)


def test_nothing_is_left_to_do():
    word = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    expect_none([str(m.path) for m in PACKAGES if word.search(m.text)])


def test_only_outermost_frames_catch_everything_and_say_so():
    """A bare or catch-all except needs a comment on its line that says why."""
    found = []
    for module in PACKAGES:
        lines = module.text.splitlines()
        for node in module.all_of(ast.ExceptHandler):
            if node.type is None or dotted(node.type) in ("Exception", "BaseException"):
                raises = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
                if not raises and "#" not in lines[node.lineno - 1]:
                    found.append(f"{module.path}:{node.lineno}")
    expect_none(found)


def test_every_public_module_says_what_it_is():
    expect_none([str(m.path) for m in PACKAGES if m.tree.body and not ast.get_docstring(m.tree) and m.path.name != "__main__.py"])
