"""The family of tasks: deterministic, valid, split without overlap, scored by fraction."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.core.records import Validity
from qwengyre.sandbox.families.mini_repositories import (
    CHECK_COMMAND,
    OPERATORS,
    MiniRepository,
    draw_task,
    generate,
    split_pairs,
    write_task,
)
from qwengyre.sandbox.task import check_tasks, load_task
from qwengyre.testing.sandbox_kit import Kit


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def solve(repository: MiniRepository, workspace: Path, num_right: int) -> None:
    """Write every file, the first `num_right` of them right."""
    for index, function in enumerate(repository.functions):
        symbol = OPERATORS[function.pair.word] if index < num_right else "**"
        source = f"def {function.name}(x):\n    return x {symbol} {function.pair.constant}\n"
        (workspace / function.path).write_text(source, encoding="utf-8")


def run(command: str, workspace: Path, **variables: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path} | variables
    return subprocess.run(command, shell=True, cwd=workspace, env=environment, text=True, capture_output=True, check=True).stdout


@pytest.fixture
def repository() -> MiniRepository:
    return draw_task("task", split_pairs(0)[0], np.random.default_rng(5))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate(tmp_path / name, seed, num_train=3, num_held_out=2)
    assert tree(tmp_path / "a") == tree(tmp_path / "b") != tree(tmp_path / "c")


def test_all_tasks_are_valid(tmp_path: Path):
    generate(tmp_path, 0, num_train=4, num_held_out=3)
    for split, num_tasks in (("train", 4), ("held-out", 3)):
        tasks, problems = check_tasks(tmp_path / split)
        assert len(tasks) == num_tasks and [p for p in problems if p.severity == "error"] == []


@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_held_out_for_every_operator(seed: int):
    train, held_out = split_pairs(seed)
    assert not set(train) & set(held_out)
    assert {pair.word for pair in held_out} == {pair.word for pair in train} == set(OPERATORS)


def test_only_the_right_operator_passes_the_tests(repository: MiniRepository):
    for function in repository.functions:
        for cases in (repository.check_cases, repository.score_cases):
            passing = [
                word
                for word, symbol in OPERATORS.items()
                if all(eval(f"{x} {symbol} {function.pair.constant}") == y for x, y in cases[function.name])
            ]
            assert passing == [function.pair.word]


def test_the_score_uses_other_inputs_than_the_self_test(repository: MiniRepository):
    for name, cases in repository.check_cases.items():
        assert not set(cases) & set(repository.score_cases[name])


@pytest.mark.parametrize("num_right", [0, 2, 4])
def test_the_score_is_the_fraction_of_functions_that_work(tmp_path: Path, repository: MiniRepository, num_right: int):
    task, workspace, logs = write_task(tmp_path / "tasks", repository), tmp_path / "workspace", tmp_path / "logs"
    workspace.mkdir(), logs.mkdir()
    solve(repository, workspace, num_right)
    run(f"bash {task}/tests/test.sh", workspace, VERIFIER_DIR=str(logs))
    expected = min(num_right, len(repository.functions)) / len(repository.functions)
    assert float((logs / "reward.txt").read_text()) == pytest.approx(expected, abs=1e-6)


def test_broken_files_score_nothing_and_break_nothing(tmp_path: Path, repository: MiniRepository):
    task, workspace, logs = write_task(tmp_path / "tasks", repository), tmp_path / "workspace", tmp_path / "logs"
    workspace.mkdir(), logs.mkdir()
    for function, source in zip(
        repository.functions, ("def f(:", "import sys; sys.exit(0)", "g = 1", "raise KeyError"), strict=False
    ):
        (workspace / function.path).write_text(source)
    run(f"bash {task}/tests/test.sh", workspace, VERIFIER_DIR=str(logs))
    assert float((logs / "reward.txt").read_text()) == 0


def test_the_self_test_names_the_next_file_and_every_wrong_one_once(tmp_path: Path, repository: MiniRepository):
    task = write_task(tmp_path / "tasks", repository)
    workspace = task / "environment"
    first, second = repository.functions[:2]
    assert run(CHECK_COMMAND, workspace) == f"next {first.line}\n"
    (workspace / first.path).write_text("def f(x):\n    return 0\n")
    assert run(CHECK_COMMAND, workspace) == f"wrong {first.line}\n"
    assert run(CHECK_COMMAND, workspace) == f"next {second.line}\n"
    solve(repository, workspace, len(repository.functions))
    total = len(repository.functions)
    assert run(CHECK_COMMAND, workspace) == f"done: {total} of {total} pass\n"


CHEATS = {
    "looks into the scorer": """
import sys
frame = sys._getframe()
while frame:
    for space in (frame.f_globals, frame.f_locals):
        for name, value in list(space.items()):
            if callable(value) and name in ("is_right", "answers", "read"):
                space[name] = lambda *_: True
    frame = frame.f_back
""",
    "is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def {name}(x): return Any(0)
""",
    "writes the reward": """
import os, sys
open(sys.argv[1], "w").write("1.0")
def {name}(x): return 0
""",
    "writes the reward later": """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try: open(sys.argv[1], "w").write("1.0")
            except OSError: pass
    os._exit(0)
def {name}(x): return 0
""",
    "takes the place of the reward": """
import os, sys
os.makedirs(sys.argv[1] + "/x")
def {name}(x): return 0
""",
    "reads what is expected": """
import json, os, sys
expected = json.load(open(os.path.join(os.path.dirname(sys.argv[0]), "expected.json")))["{name}"]
def {name}(x): return expected.pop(0)
""",
    "ends the process": "import os; os._exit(0)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(1)",
    "writes into its parent": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')\ndef {name}(x): return 0",
    "answers without end": "import os\nwhile True: os.write(1, b'x'); os.write(4, b'[1' * 1000)",
    "nests": "def {name}(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "does not end": "while True: pass",
}


@pytest.mark.integration
@pytest.mark.parametrize("cheat", CHEATS)
def test_code_of_the_workspace_cannot_score_itself(tmp_path: Path, cheat: str):
    """As process 1 of a sandbox, as the evaluator runs it."""
    repository = draw_task("task", split_pairs(0)[0], np.random.default_rng(5))
    task = load_task(write_task(tmp_path / "tasks", repository))
    kit = Kit(tmp_path)
    files = {function.path: CHEATS[cheat].replace("{name}", function.name) for function in repository.functions}
    code = f"import json\nfor name, text in json.loads({json.dumps(json.dumps(files))}).items(): open(name, 'w').write(text)"
    launched = msgspec.structs.replace(kit.task(code), folder=task.folder, verifier_timeout_s=60.0)
    outcome = kit.run(launched, kit.config())
    if cheat == "reads what is expected" and not has_landlock():
        pytest.skip("this kernel has no Landlock: files of tests/ can be read by code that is tested")
    assert (outcome.validity, outcome.score) == (Validity.VALID, 0.0), outcome.detail
    assert outcome.evaluator_tries == 1, "the scorer gave a score of its own"


def test_one_cheat_costs_the_other_functions_nothing(tmp_path: Path, repository: MiniRepository):
    task, workspace, logs = write_task(tmp_path / "tasks", repository), tmp_path / "workspace", tmp_path / "logs"
    workspace.mkdir(), logs.mkdir()
    num = len(repository.functions)
    solve(repository, workspace, num)
    (workspace / repository.functions[0].path).write_text("import os; os._exit(0)")
    run(f"bash {task}/tests/test.sh", workspace, VERIFIER_DIR=str(logs))
    assert float((logs / "reward.txt").read_text()) == pytest.approx((num - 1) / num, abs=1e-6)


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
