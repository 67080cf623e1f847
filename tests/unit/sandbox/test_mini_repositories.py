"""The family of tasks: deterministic, valid, split without overlap, scored by fraction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwengyre.sandbox.families.mini_repositories import (
    CHECK_COMMAND,
    OPERATORS,
    MiniRepository,
    draw_task,
    generate,
    split_pairs,
    write_task,
)
from qwengyre.sandbox.task import check_tasks


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
