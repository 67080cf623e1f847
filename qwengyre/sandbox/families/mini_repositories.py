"""Mini repositories: a short specification, an empty workspace, tests that give the fraction of functions that work.

Each task asks for three or four one-function files. `environment/check.py` is a self-test that the agent may run: it names
the next missing file, and every wrong file once. `tests/score.py` scores the workspace on other inputs, without running its code in the
scorer's own process. No (operator,
constant) pair, and so no test, of a held-out task occurs in a training task or in a demonstration of the warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

OPERATORS: dict[str, str] = {
    "plus": "+", "minus": "-", "times": "*", "over": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
"""The word of the specification and the Python operator that it means."""
CONSTANTS = range(2, 41)
NAMES = ("f", "g", "h", "k")
HELD_OUT_SHARE = 0.25
EDITION = 2
"""Of what is written into a task: one of an earlier edition in a cache is not used."""
CHECK_COMMAND = "python3 -IS check.py"
WATCH_COMMAND = f"{CHECK_COMMAND} --watch"

_APPLY: dict[str, Callable[[int, int], int]] = {
    "plus": lambda x, c: x + c, "minus": lambda x, c: x - c, "times": lambda x, c: x * c, "over": lambda x, c: x // c,
    "mod": lambda x, c: x % c, "and": lambda x, c: x & c, "or": lambda x, c: x | c, "xor": lambda x, c: x ^ c,
}  # fmt: skip


class Pair(msgspec.Struct, frozen=True, order=True):
    """What one function computes: `x <operator> <constant>`."""

    word: str
    constant: int


class Function(msgspec.Struct, frozen=True):
    name: str
    pair: Pair

    @property
    def path(self) -> str:
        return f"{self.name}.py"

    @property
    def line(self) -> str:
        """The line of the specification, as instruction and self-test show it."""
        return f"{self.name}.py: {self.name}(x) is x {self.pair.word} {self.pair.constant}"


class MiniRepository(msgspec.Struct, frozen=True):
    task: str
    functions: tuple[Function, ...]
    check_cases: dict[str, list[tuple[int, int]]]
    """Inputs and expected outputs by function name, for the self-test."""
    score_cases: dict[str, list[tuple[int, int]]]
    """Other inputs, for the score."""

    @property
    def instruction(self) -> str:
        lines = "\n".join(function.line for function in self.functions)
        return f"{_PREAMBLE}\n{lines}"


_PREAMBLE = f"""\
Write these Python files, one function each, over whole numbers (over is //, mod %, and &, or |, xor ^).
`{CHECK_COMMAND}` tells what is missing or wrong."""


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All (operator, constant) pairs, as those of training and those held out; every operator occurs in both."""
    rng = np.random.default_rng([seed, 0])
    train, held_out = [], []
    for word in OPERATORS:
        constants = rng.permutation(list(CONSTANTS))
        num_held_out = round(HELD_OUT_SHARE * len(constants))
        held_out += [Pair(word, int(constant)) for constant in constants[:num_held_out]]
        train += [Pair(word, int(constant)) for constant in constants[num_held_out:]]
    return train, held_out


def draw_task(task: str, pairs: Sequence[Pair], rng: np.random.Generator) -> MiniRepository:
    """One task of three or four functions over distinct `pairs`."""
    num_functions = int(rng.integers(3, len(NAMES) + 1))
    chosen = rng.choice(len(pairs), size=num_functions, replace=False)
    functions = tuple(Function(name, pairs[index]) for name, index in zip(NAMES, chosen, strict=False))
    check, score = ({f.name: _draw_cases(f.pair, rng) for f in functions} for _ in range(2))
    return MiniRepository(task, functions, check, score)


def _draw_cases(pair: Pair, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Three inputs on which no other operator gives the same results."""
    while True:
        inputs = [int(x) for x in rng.integers(100, 10_000, size=3)]
        results = {word: [apply(x, pair.constant) for x in inputs] for word, apply in _APPLY.items()}
        if sum(result == results[pair.word] for result in results.values()) == 1:
            return list(zip(inputs, results[pair.word], strict=True))


def generate(folder: Path, seed: int, num_train: int = 96, num_held_out: int = 24) -> None:
    """Write `folder`/train and `folder`/held-out, one task folder each; the same arguments give the same bytes."""
    train, held_out = split_pairs(seed)
    for split, pairs, num_tasks, stream in (("train", train, num_train, 1), ("held-out", held_out, num_held_out, 2)):
        for index in range(num_tasks):
            rng = np.random.default_rng([seed, stream, index])
            write_task(folder / split, draw_task(f"mini-{split}-{index:03d}", pairs, rng))


def write_task(folder: Path, repository: MiniRepository) -> Path:
    """Write one task in the Harbor format; return its folder."""
    root = folder / repository.task
    files = {
        "task.toml": _TASK_TOML,
        "instruction.md": repository.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "environment/check.py": check_source(repository),
        "tests/test.sh": _TEST_SH,
        "tests/score.py": Path(__file__).with_name("score.py").read_text(encoding="utf-8"),
        "tests/inputs.json": json.dumps({name: [x for x, _ in cases] for name, cases in repository.score_cases.items()}),
        "tests/expected.json": json.dumps({name: [y for _, y in cases] for name, cases in repository.score_cases.items()}),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def check_source(repository: MiniRepository) -> str:
    lines = {function.name: function.line for function in repository.functions}
    source = _CHECK.replace("@CASES@", json.dumps(repository.check_cases)).replace("@WORKS@", _WORKS)
    return source.replace("@LINES@", json.dumps(lines))


_TASK_TOML = """\
version = "1.0"

[metadata]
category = "mini-repositories"

[agent]
timeout_sec = 20.0

[verifier]
timeout_sec = 10.0
"""

_DOCKERFILE = """\
FROM python:3.11-slim
WORKDIR /app
COPY check.py .
"""

_TEST_SH = """\
#!/bin/bash
exec python3 -I -S "$(dirname "$0")/score.py" "${VERIFIER_DIR:-/logs/verifier}/reward.txt"
"""

_WORKS = '''\
def works(name, root):
    """Whether the file exists and its function gives every expected result; None if the file is missing."""
    path = os.path.join(root, name + ".py")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            namespace = {}
            exec(compile(file.read(), path, "exec"), namespace)
        return all(namespace[name](x) == y for x, y in CASES[name])
    except BaseException:
        return False
'''

_CHECK = '''\
"""Self-test: names the next missing file, and every wrong file once. With --watch it goes on until stopped."""
import os
import sys
import time

CASES = @CASES@
LINES = @LINES@


@WORKS@

def report(root):
    notes = os.path.join(root, ".shown")
    shown = []
    if os.path.exists(notes):
        with open(notes, encoding="utf-8") as file:
            shown = file.read().split()
    state = {name: works(name, root) for name in LINES}
    for name, line in LINES.items():
        if state[name] is None:
            return "next " + line
        if not state[name] and name not in shown:
            with open(notes, "a", encoding="utf-8") as file:
                file.write(name + "\\n")
            return "wrong " + line
    return f"done: {sum(state.values())} of {len(state)} pass"


if __name__ == "__main__":
    print(report("."), flush=True)
    while "--watch" in sys.argv:
        time.sleep(1)
        print(report("."), flush=True)
'''
