"""Rows of data sets as tasks: a question with an answer or a checker; a repository with a patch and tests (SWE-bench and its like)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from qwengyre.sandbox.suites.folders import JUDGE_HEAD, ImportedTask, SuiteRow, rows_of

ANSWER: Final = "answer.txt"
NUM_ANSWER_BYTES: Final = 100_000
CHECK: Final = f'''\
"""Compares {ANSWER} of the workspace with what is expected: as numbers if both are, else as texts without case and outer space."""
import json, os, sys

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "expected.json")) as file:
    expected = json.load(file)
try:
    with open("{ANSWER}", errors="replace") as file:
        given = file.read({NUM_ANSWER_BYTES})
except OSError:
    given = ""


def same(one, other):
    one, other = " ".join(one.split()).casefold(), " ".join(other.split()).casefold()
    try:
        return abs(float(one.replace(",", "")) - float(other.replace(",", ""))) <= 1e-9 * max(1.0, abs(float(other.replace(",", ""))))
    except ValueError:
        return one == other


print(float(any(same(given, one) for one in expected)))
'''
RUN_CHECKER: Final = f'''\
"""Runs `score(answer)` of checker.py, which knows nothing of the workspace but the text of {ANSWER}."""
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checker

try:
    with open("{ANSWER}", errors="replace") as file:
        given = file.read({NUM_ANSWER_BYTES})
except OSError:
    given = ""
print(float(checker.score(given)))
'''
SCORE: Final = '#!/bin/bash\nexec python3 -I -S "$TESTS_DIR/{program}" > "$VERIFIER_DIR/reward.txt"\n'


def questions(path: Path) -> Iterator[ImportedTask]:
    """Rows with `question` (or prompt, problem, instruction) and `answer` (a text, or a list of them), or `checker` (Python with a
    `score(answer) -> float`). The answer is to be written into answer.txt. Raises ConfigError."""
    for number, values in rows_of(path):
        row = SuiteRow(path, number, values)
        said = row.text("question", "prompt", "problem", "instruction")
        instruction = f"{said.rstrip()}\n\nWrite your answer, and nothing else, into the file {ANSWER}.\n"
        name = row.optional("id", "task_id", "name") or f"{path.stem}-{number:06d}"
        if checker := row.optional("checker"):
            try:
                compile(checker, "checker", "exec")
            except (SyntaxError, ValueError) as error:
                raise row.error(f"its checker is not Python: {error}") from None
            if not re.search(r"^def score\(", checker, re.MULTILINE):
                raise row.error("its checker has no function score(answer)")
            files = {"tests/checker.py": checker, "tests/run_checker.py": RUN_CHECKER}
            program = "run_checker.py"
        else:
            given = values.get("answer", values.get("expected"))
            answers = given if isinstance(given, list) else [row.text("answer", "expected")]
            files = {"tests/expected.json": json.dumps([str(one) for one in answers]), "tests/check.py": CHECK}
            program = "check.py"
        yield ImportedTask(name, instruction, {**files, "tests/test.sh": SCORE.format(program=program)})


SWE_JUDGE: Final = '''\
"""1 if every test that has to pass is said to have passed, else 0."""
import json, os, re, sys

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "required.json")) as file:
    required = json.load(file)
passed, failed = set(), set()
with open(os.path.join(os.environ.get("TMPDIR", "/tmp"), "test-output.txt"), errors="replace") as file:
    for line in file:
        found = re.match(r"(PASSED|XFAIL|FAILED|ERROR) +(.+?)(?: - .*)?$", line.strip())
        if found:
            (passed if found[1] in ("PASSED", "XFAIL") else failed).add(found[2])
print(float(all(name in passed and name not in failed for name in required)))
'''
FIND_PYTHON: Final = "$(command -v python3 || command -v python || echo /opt/miniconda3/bin/python)"
SWE_TEST: Final = JUDGE_HEAD + f'{FIND_PYTHON} -I -S "$TESTS_DIR/judge.py" > "$VERIFIER_DIR/reward.txt"\n'
SWE_RUN: Final = """\
if [ -f /opt/miniconda3/bin/activate ]; then source /opt/miniconda3/bin/activate testbed; fi
git config --global --add safe.directory "$PWD"
{restore}
git apply --whitespace=nowarn "$TESTS_DIR/test.patch" || exit 1
{command}
"""
SWE_SOLVE: Final = 'git apply --whitespace=nowarn "$(dirname "$0")/gold.patch"\n'
PYTEST: Final = "python -m pytest -rA --tb=no -p no:cacheprovider"
PATCHED: Final = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
SAFE_PATH: Final = re.compile(r"[A-Za-z0-9_./@+-]+")
OFFICIAL_IMAGE: Final = "docker.io/swebench/sweb.eval.x86_64.{name}:latest"


def swe_rows(path: Path, command: str = "") -> Iterator[ImportedTask]:
    """Rows with instance_id, problem_statement, patch, test_patch, FAIL_TO_PASS and PASS_TO_PASS; an image_name, or SWE-bench's own.

    `command` runs the tests of the files that the test patch touches and says PASSED or FAILED of each, as `pytest -rA` does; a row's own
    `test_cmd` comes first. Raises ConfigError.
    """
    for number, values in rows_of(path):
        row = SuiteRow(path, number, values)
        name = row.text("instance_id", "id")
        tests = row.text("test_patch")
        required = [*row.texts("FAIL_TO_PASS"), *(row.texts("PASS_TO_PASS") if values.get("PASS_TO_PASS") else ())]
        if not required:
            raise row.error("names no test that has to pass (FAIL_TO_PASS)")
        touched = list(dict.fromkeys(found[2] for found in PATCHED.finditer(tests)))
        if not touched or not all(SAFE_PATH.fullmatch(one) and not one.startswith("-") for one in touched):
            raise row.error("its test_patch names no files, or files with unusual names")
        base = row.optional("base_commit") or "HEAD"
        if not re.fullmatch(r"[A-Za-z0-9]+", base):
            raise row.error(f"{base!r} is not a commit")
        restore = "\n".join(f"git checkout -q {base} -- {one} 2>/dev/null || rm -f {one}" for one in touched)
        ran = f"{_command(values) or command or PYTEST} {' '.join(one for one in touched if one.endswith('.py')) or ' '.join(touched)}"
        files = {
            "tests/test.sh": SWE_TEST,
            "tests/run.sh": SWE_RUN.format(restore=restore, command=ran),
            "tests/judge.py": SWE_JUDGE,
            "tests/required.json": json.dumps(required),
            "tests/test.patch": tests,
        }
        if gold := row.optional("patch"):
            files |= {"solution/gold.patch": gold, "solution/solve.sh": SWE_SOLVE}
        image = row.optional("image_name", "docker_image", "image") or OFFICIAL_IMAGE.format(
            name=name.lower().replace("__", "_1776_")
        )
        yield ImportedTask(name, row.text("problem_statement"), files, image=image, timeout_s=3600.0, verifier_timeout_s=1800.0)


def _command(values: dict[str, object]) -> str:
    """`test_cmd` of a row, or of its install_config, as SWE-rebench has it."""
    config = values.get("install_config")
    given = values.get("test_cmd") or (config.get("test_cmd") if isinstance(config, dict) else None)
    return (
        given[-1] if isinstance(given, list) and given and isinstance(given[-1], str) else given if isinstance(given, str) else ""
    )
