"""Task folders: what is accepted, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.sandbox.task import Problem, check_task, check_tasks, find_task_folders, load_task, load_tasks

HARBOR = """\
version = "1.0"
schema_version = "1.1"

[task]
name = "org/hello"
keywords = ["trivial"]

[metadata]
author_name = "A"
difficulty = "easy"
anything = { goes = [1, 2] }

[verifier]
timeout_sec = 120.0
env = { MODE = "strict" }

[agent]
timeout_sec = 90

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
allow_internet = true
env = { LANGUAGE = "en" }
"""


def make(folder: Path, toml: str = HARBOR, **files: str | None) -> Path:
    """A task folder; `files` replaces (or, with None, leaves out) instruction, test or others (`__` is a slash)."""
    contents = {"task.toml": toml, "instruction.md": "Say hello.\n", "tests/test.sh": "echo 1 > $VERIFIER_DIR/reward.txt\n"}
    contents |= {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def messages(folder: Path) -> list[str]:
    return [str(problem).replace(f"{folder}/", "") for problem in check_task(folder)[1]]


def test_a_real_harbor_task_loads(tmp_path):
    task = load_task(make(tmp_path / "hello"))
    assert (task.name, task.instruction, task.agent_timeout_s, task.verifier_timeout_s) == ("hello", "Say hello.\n", 90.0, 120.0)
    assert (task.agent_env, task.verifier_env, task.reward_range) == ({"LANGUAGE": "en"}, {"MODE": "strict"}, (0.0, 1.0))
    assert task.tests == tmp_path / "hello" / "tests" and messages(tmp_path / "hello") == []


def test_timeouts_default_to_harbors(tmp_path):
    task = load_task(make(tmp_path / "t", "[metadata]\nreward_range = [-1, 2.5]\n"))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.reward_range) == (600.0, 600.0, (-1.0, 2.5))


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ('[agent]\ntimeout_sec = "60"\n', "task.toml:2: error: agent.timeout_sec: must be a number of seconds, not '60'"),
        ("[agent]\n\ntimeout_sec = true\n", "task.toml:3: error: agent.timeout_sec: must be a number of seconds, not True"),
        ("agent.timeout_sec = 0\n", "task.toml:1: error: agent.timeout_sec: must be above 0 and finite, not 0"),
        ("[verifier]\ntimeout_sec = inf\n", "task.toml:2: error: verifier.timeout_sec: must be above 0 and finite, not inf"),
        ("verifier = 3\n", "task.toml:1: error: verifier: must be a table, not 3"),
        ("[agnet]\ntimeout_sec = 1\n", "task.toml:1: error: agnet: unknown; did you mean agent?"),
        ("[agent]\ntimeout = 1\n", "task.toml:2: error: agent.timeout: unknown; did you mean timeout_sec?"),
        ("[agent]\ncolour = 1\n", "task.toml:2: warning: agent.colour: unknown, and ignored"),
        ('[verifier]\nenv = { A = "${HOME}" }\n', "task.toml:2: error: verifier.env.A: quotes the host's environment (${HOME}), which no sandbox is given"),
        ("[verifier.env]\nB = 1\n", "task.toml:2: error: verifier.env.B: must be text, not 1"),
        ('[environment.env]\n"A B" = "x"\n', "task.toml:2: error: environment.env.A B: not a name for an environment variable"),
        ("[environment]\ngpus = 1\n", "task.toml:2: error: environment.gpus: this sandbox gives no GPU"),
        ('[environment]\ndocker_image = "x"\n', "task.toml:2: warning: environment.docker_image: not pulled; the task runs on the programs of this machine"),
        ("[[steps]]\nname = 'a'\n", "task.toml:1: error: steps: tasks of several steps cannot run here: make each step a task"),
        ("[metadata]\nreward_range = [1, 0]\n", "task.toml:2: error: metadata.reward_range: must be [lowest, highest], not [1, 0]"),
        ("[agent]\ntimeout_sec = = 1\n", "task.toml:2: error: not TOML: Invalid value"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_task_toml_is_named_with_its_line(tmp_path, toml, expected):
    assert messages(make(tmp_path / "t", toml)) == [expected]


@pytest.mark.parametrize("table", ["environment", "verifier"])
@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "PATH", "PYTHONPATH", "PYTHONSTARTUP", "GLIBC_TUNABLES", "GCONV_PATH", "NODE_OPTIONS", "SHELLOPTS", "ENV"],
)  # fmt: skip
def test_a_variable_that_tells_programs_what_to_run_is_refused(tmp_path, table, name):
    (said,) = messages(make(tmp_path / "t", f"[{table}.env]\nOTHER_PATH = 'y'\n{name} = 'x'\n"))
    assert said.startswith(f"task.toml:3: error: {table}.env.{name}: tells loaders, shells or interpreters what to run")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"instruction_dot_md": None}, "instruction.md: error: missing"),
        ({"instruction_dot_md": " \n"}, "instruction.md: error: empty"),
        ({"instruction_dot_md": "a\nb\0c"}, "instruction.md:2: error: holds a NUL byte"),
        ({"instruction_dot_md": "x" * 100_001}, "instruction.md: error: 100,001 bytes"),
        ({"tests__test_dot_sh": None}, "tests/test.sh: error: missing"),
        ({"tests__test_dot_sh": "\n"}, "tests/test.sh: error: empty"),
        ({"tests__test_dot_sh": "exit 0"}, "tests/test.sh: warning: no file of tests/ mentions a reward file"),
        ({"environment__docker-compose_dot_yaml": "x"}, "environment/docker-compose.yaml: error: tasks of several containers"),
        ({"environment__Dockerfile": "FROM x\nRUN apt install y\n"}, "environment/Dockerfile:2: warning: not built"),
        ({"environment": "a file"}, "environment: error: must be a folder"),
    ],
)
def test_what_is_wrong_in_the_files_is_named(tmp_path, files, expected):
    found = messages(make(tmp_path / "t", **files))
    assert len(found) == 1 and found[0].startswith(expected)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    folder = make(tmp_path / "t")
    (folder / "instruction.md").write_bytes(b"fine\nnot \xff")
    (folder / "task.toml").write_bytes(b"# \xff")
    assert messages(folder) == ["instruction.md:2: error: not UTF-8 at byte 9", "task.toml: error: not UTF-8 at byte 2"]


def test_links_out_of_the_environment_and_special_files_are_refused(tmp_path):
    import os

    folder = make(tmp_path / "t", environment__a="x", environment__b__c="y")
    (folder / "environment/inside").symlink_to("b/c")
    assert messages(folder) == []
    (folder / "environment/outside").symlink_to("/etc/passwd")
    os.mkfifo(folder / "environment/pipe")
    assert [line.split(": ")[0] for line in messages(folder)] == ["environment/outside", "environment/pipe"]


def test_every_problem_of_every_task_is_reported(tmp_path):
    make(tmp_path / "deep/a", "[agent]\ntimeout_sec = -1\n[environment]\ngpus = 2\n", instruction_dot_md=None)
    make(tmp_path / "b")
    make(tmp_path / "other/b")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/task.yaml").write_text("x")
    tasks, problems = check_tasks(tmp_path)
    assert [task.name for task in tasks] == ["b"]
    assert len([problem for problem in problems if "deep/a" in problem.file]) == 3
    assert any("task.yaml is the first Terminal-Bench format" in problem.message for problem in problems)
    assert any("its name is taken by" in problem.message for problem in problems)
    with pytest.raises(ConfigError, match=r"deep/a/instruction\.md: missing.* \(and \d more: qwengyre tasks check"):
        load_tasks(tmp_path)


def test_folders_without_tasks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        find_task_folders(tmp_path / "nowhere")
    (tmp_path / ".hidden").mkdir()
    make(tmp_path / ".hidden/t")
    with pytest.raises(ConfigError, match="no task in this folder"):
        find_task_folders(tmp_path)


def test_problems_sort_by_file_then_line():
    problems = [Problem("b", 1, "error", "x"), Problem("a", 10, "error", "x"), Problem("a", 2, "error", "x")]
    assert [(problem.file, problem.line) for problem in sorted(problems)] == [("a", 2), ("a", 10), ("b", 1)]
