"""Suites in their public formats become task folders that pass the check, and that score as their suite does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from qwengyre.core.errors import ConfigError
from qwengyre.images.config import SandboxConfig
from qwengyre.sandbox.suites.folders import ImportedTask, write_tasks
from qwengyre.sandbox.suites.pull import pull
from qwengyre.sandbox.suites.repositories import nl2repo, terminal_bench
from qwengyre.sandbox.suites.rows import questions, swe_rows
from qwengyre.sandbox.task import check_tasks
from qwengyre.testing.images import layer, write_oci

PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-assert add(1, 1) == 3
+assert add(1, 1) == 2
"""
SWE = {
    "instance_id": "me__adder-7",
    "problem_statement": "add() is wrong.",
    "base_commit": "abc123",
    "patch": PATCH.replace("tests/test_a.py", "a.py"),
    "test_patch": PATCH,
    "FAIL_TO_PASS": '["tests/test_a.py::test_add"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_zero"],
}


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def written(tasks, target: Path) -> dict[str, Path]:
    """The tasks as written, by name; each passes the check."""
    names = [task.name for task in write_tasks(tasks, target)]
    found, problems = check_tasks(target)
    assert [str(problem) for problem in problems] == []
    assert len(found) == len(names)
    return {task.name: Path(task.folder) for task in found}


def reward(task: Path, workspace: Path, scratch: Path) -> str:
    """What tests/test.sh writes, run in a workspace without isolation."""
    scratch.mkdir(exist_ok=True)
    variables = os.environ | {"TESTS_DIR": str(task / "tests"), "VERIFIER_DIR": str(scratch), "TMPDIR": str(scratch)}
    subprocess.run(["bash", str(task / "tests" / "test.sh")], cwd=workspace, env=variables, check=True)
    return (scratch / "reward.txt").read_text().strip()


def test_questions_with_answers(tmp_path: Path):
    rows = [{"id": "sum/1", "question": "1000 + 234?", "answer": "1,234"}, {"prompt": "Who?", "answer": ["Ada  Lovelace", "Ada"]}]
    tasks = written(questions(write_rows(tmp_path / "q.jsonl", *rows)), tmp_path / "tasks")
    assert sorted(tasks) == ["q-000002", "sum-1"]
    assert "1000 + 234?" in (tasks["sum-1"] / "instruction.md").read_text()
    workspace = tmp_path / "w"
    workspace.mkdir()
    assert reward(tasks["sum-1"], workspace, tmp_path / "v") == "0.0"
    for name, given, expected in (("sum-1", "1234.0\n", "1.0"), ("sum-1", "1235", "0.0"), ("q-000002", " ada lovelace ", "1.0")):
        (workspace / "answer.txt").write_text(given)
        assert reward(tasks[name], workspace, tmp_path / "v") == expected, given


def test_questions_with_a_checker_from_parquet(tmp_path: Path):
    checker = "def score(answer):\n    return 0.5 if answer.strip().isdigit() else 0\n"
    parquet.write_table(
        pyarrow.Table.from_pylist([{"id": "a", "problem": "A number?", "checker": checker}]), tmp_path / "q.parquet"
    )
    (task,) = written(questions(tmp_path / "q.parquet"), tmp_path / "tasks").values()
    (tmp_path / "answer.txt").write_text("12\n")
    (tmp_path / "checker.py").write_text("def score(answer): return 1")  # of the workspace: not the one that is asked
    assert reward(task, tmp_path, tmp_path / "v") == "0.5"


def test_rows_of_swe_bench(tmp_path: Path):
    (task,) = written(swe_rows(write_rows(tmp_path / "rows.jsonl", SWE)), tmp_path / "tasks").values()
    toml = (task / "task.toml").read_text()
    assert 'docker_image = "docker.io/swebench/sweb.eval.x86_64.me_1776_adder-7:latest"' in toml
    run = (task / "tests" / "run.sh").read_text()
    assert "git checkout -q abc123 -- tests/test_a.py" in run
    assert run.rstrip().endswith("-p no:cacheprovider tests/test_a.py")
    assert (task / "solution" / "gold.patch").read_text() == SWE["patch"]


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("PASSED tests/test_a.py::test_add\nPASSED tests/test_a.py::test_zero\n", "1.0"),
        ("PASSED tests/test_a.py::test_add\n", "0.0"),
        ("PASSED tests/test_a.py::test_add\nFAILED tests/test_a.py::test_zero - assert 1 == 2\n", "0.0"),
        ("PASSED tests/test_a.py::test_add\nPASSED tests/test_a.py::test_zero\nFAILED tests/test_a.py::test_zero\n", "0.0"),
        ("", "0.0"),
    ],
)
def test_a_row_of_swe_bench_is_scored_by_all_of_its_tests(tmp_path: Path, output: str, score: str):
    (task,) = written(swe_rows(write_rows(tmp_path / "rows.jsonl", SWE)), tmp_path / "tasks").values()
    (task / "tests" / "run.sh").write_text(f"cat <<'END'\n{output}END\n")
    assert reward(task, tmp_path, tmp_path / "v") == score


def make_terminal_bench(folder: Path) -> Path:
    files = {
        "task.yaml": "instruction: |-\n  Make hello.\nmax_agent_timeout_sec: 60\nparser_name: pytest\n",
        "Dockerfile": "FROM python:3.12\nCOPY data.txt /app/\n",
        "data.txt": "data",
        "docker-compose.yaml": "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}\n",
        "run-tests.sh": '#!/bin/bash\n# pip install is done\nbash "$TEST_DIR/test_outputs.sh"\n',
        "tests/test_outputs.sh": "test -f hello\n",
        "solution.sh": "touch hello\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_folders_of_the_first_terminal_bench(tmp_path: Path):
    make_terminal_bench(tmp_path / "suite" / "hello")
    networked = make_terminal_bench(tmp_path / "suite" / "networked")
    (networked / "run-tests.sh").write_text("curl -LsSf https://example.org/install.sh | sh\n")
    imported = {task.name: task for task in terminal_bench(tmp_path / "suite")}
    assert imported["hello"].warnings == ()
    assert "uses curl, and there is no network" in imported["networked"].warnings[0]
    task = written(imported.values(), tmp_path / "tasks")["hello"]
    assert "timeout_sec = 60.0" in (task / "task.toml").read_text()
    assert sorted(path.name for path in (task / "environment").iterdir()) == ["Dockerfile", "data.txt", "docker-compose.yaml"]
    workspace = tmp_path / "w"
    workspace.mkdir()
    assert reward(task, workspace, tmp_path / "v") == "0"
    subprocess.run(["bash", str(task / "solution" / "solve.sh")], cwd=workspace, check=True)
    assert reward(task, workspace, tmp_path / "v") == "1"


def test_nl2repobench_does_not_show_its_tests(tmp_path: Path):
    image = write_oci(
        tmp_path / "oci",
        [layer(("workspace/tests/test_a.py", b"hidden\n"), ("workspace/pyproject.toml", b""))],
        WorkingDir="/workspace",
    )
    folder = tmp_path / "suite" / "test_files" / "adder"
    folder.mkdir(parents=True)
    files = {"start.md": "Write adder.", "test_commands.json": '["echo; cat tests/test_a.py; echo 3 passed, 1 failed in 0.1s"]'}
    files |= {"test_files.json": '["tests"]', "test_case_count.txt": "4\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    sandbox = SandboxConfig(store=str(tmp_path / "store"))
    (task,) = written(nl2repo(tmp_path / "suite", sandbox, image=f"oci:{image}"), tmp_path / "tasks").values()
    assert "find /workspace -mindepth 1 -delete" in (task / "environment" / "Dockerfile").read_text()
    workspace = tmp_path / "w"
    (workspace / "tests").mkdir(parents=True)
    (workspace / "tests" / "test_b.py").write_text("of the policy")
    assert reward(task, workspace, tmp_path / "v") == "0.75"
    assert "hidden" in (tmp_path / "v" / "test-output.txt").read_text()
    assert sorted(path.name for path in (workspace / "tests").iterdir()) == ["test_a.py"]


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (questions, {"id": "a", "answer": "1"}, "has no question or prompt"),
        (questions, {"question": "a"}, "has no answer"),
        (questions, {"question": "a", "checker": "def score(:"}, "its checker is not Python"),
        (questions, {"question": "a", "checker": "x = 1"}, "has no function score"),
        (swe_rows, {**SWE, "FAIL_TO_PASS": "x"}, "FAIL_TO_PASS is not a list"),
        (swe_rows, {**SWE, "FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "names no test that has to pass"),
        (swe_rows, {**SWE, "test_patch": "diff --git a/$(id) b/$(id)\n"}, "files with unusual names"),
        (swe_rows, {**SWE, "base_commit": "x; rm"}, "is not a commit"),
    ],
)
def test_what_is_wrong_with_a_row_is_named_with_its_line(tmp_path: Path, read, row: dict, message: str):
    path = write_rows(tmp_path / "rows.jsonl", row)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: .*{message}"):
        list(read(path))


def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(tmp_path: Path):
    task = ImportedTask("a", "first", {"tests/test.sh": "reward"})
    list(write_tasks([task], tmp_path))
    with pytest.raises(ConfigError, match="already exists"):
        list(write_tasks([ImportedTask("../a", "second", {})], tmp_path))
    assert (tmp_path / "a" / "instruction.md").read_text() == "first\n"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_suite_is_pulled_from_git_a_folder_or_an_index(tmp_path: Path):
    repository = tmp_path / "repository"
    list(
        write_tasks([ImportedTask(name, "x", {"tests/test.sh": "echo 1 > reward"}) for name in ("a", "b")], repository / "tasks")
    )
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "x")
    commit = git(repository, "rev-parse", "HEAD")
    address = f"file://{repository}"
    assert pull(str(repository), tmp_path / "from folder") == 2
    assert pull(f"{address}#{commit}", tmp_path / "from git") == 2
    assert not (tmp_path / "from git" / ".git").exists()
    tasks = [{"name": "suite/b", "git_url": address, "git_commit_id": commit, "path": "tasks/b"}]
    index = tmp_path / "registry.json"
    index.write_text(
        json.dumps([{"name": "mine", "version": version, "description": "", "tasks": tasks} for version in ("1.0", "2.0")])
    )
    assert pull("mine@2.0", tmp_path / "from index", index) == 1
    assert [path.name for path in (tmp_path / "from index").iterdir()] == ["b"]
    for source, message in (("mine", "2 suites are called mine; there are mine@1.0, mine@2.0"), ("yours", "0 suites")):
        with pytest.raises(ConfigError, match=message):
            pull(source, tmp_path / "no", index)
    with pytest.raises(ConfigError, match="git cannot get it"):
        pull(f"file://{tmp_path}/nowhere", tmp_path / "no")
    tasks[0]["path"] = "../.."
    index.write_text(json.dumps([{"name": "mine", "tasks": tasks}]))
    with pytest.raises(ConfigError, match="is not a folder of it"):
        pull("mine", tmp_path / "no", index)
    assert not (tmp_path / "no").exists()
