"""A hook that cannot be used is refused before a run, with key, file, line and the nearest name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError, HookFailed
from qwengyre.hooks.load import HookRef, load_hook


@pytest.fixture(autouse=True)
def search_path():
    path, known = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def load(folder: Path, path: str, text: str = "", *, file: str = "", signature: str = "(execution)", digest: str = ""):
    if text:
        (folder / (file or path.partition(":")[0].replace(".", "/") + ".py")).write_text(text)
    return load_hook(HookRef("hooks.reward", path, str(folder), digest), signature)


@pytest.mark.parametrize(
    ("path", "file", "text", "line", "message"),
    [
        ("no dots", "", "", None, "write a hook as module:name"),
        ("rules_a.reward", "", "", None, "write a hook as module:name"),
        ("rules_b:reward", "rules_c.py", "x = 1\n", None, "Did you mean rules_c:reward"),
        ("rules_d:rewrad", "", "def reward(execution): ...\n", None, "Did you mean rules_d:reward"),
        (
            "rules_e:reward",
            "",
            "\n\ndef reward(execution, more): ...\n",
            3,
            "cannot be called with (execution): missing a required",
        ),
        ("rules_f:reward", "", "async def reward(execution): ...\n", 1, "is a coroutine"),
        ("rules_g:reward", "", "def reward(execution):\n    yield 1\n", 1, "has a `yield`"),
        ("rules_h:reward", "", "reward = 3\n", None, "is no function"),
        ("rules_i:reward", "", "\ndef reward(:\n", 2, "is not Python"),
        ("rules_j:reward", "", "x = 1\nfor y in [0]:\n    x / y\n", 3, "ZeroDivisionError"),
        ("rules_k:reward", "", "import json\nimport nothing_of_this_name\n", 2, "nothing_of_this_name"),
        ("rules_l:reward", "", "import sys\nsys.exit(3)\n", 2, "SystemExit"),
        ("json:reward", "json.py", "def reward(execution): ...\n", None, "rename it"),
        ("numpy:reward", "numpy.py", "def reward(execution): ...\n", None, "rename it"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, path, file, text, line, message):
    import numpy  # noqa: F401  (one of those that must not be hidden)

    with pytest.raises(ConfigError) as told:
        load(tmp_path, path, text, file=file)
    assert told.value.key == "hooks.reward" and message in str(told.value)
    assert told.value.line == line
    if line is not None:
        assert told.value.file == str(tmp_path / f"{path.partition(':')[0]}.py")


def test_a_module_of_another_run_in_this_process_is_not_taken_for_this_one(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        hook = load(tmp_path / name, "rules_m:reward", f"def reward(execution): return {name!r}\n")
        assert hook(None) == name


def test_modules_of_packages_and_classes_can_be_hooks(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    text = "class Judge:\n    def __init__(self, execution): self.seen = execution\n"
    assert load(tmp_path, "pack.rules:Judge", text)("it").seen == "it"


def test_another_file_than_at_the_controller_is_refused(tmp_path):
    hook = load(tmp_path, "rules_n:reward", "def reward(execution): ...\n")
    assert load(tmp_path, "rules_n:reward", digest=hook.ref.digest).ref == hook.ref
    with pytest.raises(ConfigError, match="another file here than at the controller"):
        load(tmp_path, "rules_n:reward", "def reward(execution): return 1\n", digest=hook.ref.digest)


def test_what_a_hook_raises_names_the_line_that_raised_and_keeps_its_cause(tmp_path):
    hook = load(
        tmp_path, "rules_o:reward", "def deeper(x):\n    return x['no']\n\ndef reward(execution):\n    return deeper({})\n"
    )
    with pytest.raises(HookFailed, match="rules_o:reward raised KeyError: 'no'") as told:
        hook(None)
    assert (told.value.hook, told.value.file, told.value.line) == ("hooks.reward", str(tmp_path / "rules_o.py"), 2)
    assert isinstance(told.value.__cause__, KeyError)
