"""Task folders: what is accepted, and what is said of the rest."""

from __future__ import annotations

import os
import shutil
import socket
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
        ('[environment]\ndocker_image = 3\n', "task.toml:2: error: environment.docker_image: must be text, not 3"),
        ('[agent]\nuser = "a"\n[verifier]\nuser = "b"\n', "task.toml:4: warning: verifier.user: 'b'; the evaluator runs as the user of the harness"),
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
        (
            {"environment__docker-compose_dot_yaml": "services: {a: {image: x}, b: {image: y}}"},
            "environment/docker-compose.yaml: error: services: tasks of several containers",
        ),
        (
            {"environment__docker-compose_dot_yaml": "services: {a: {build: .}}"},
            "environment/Dockerfile: error: missing: docker-compose.yaml builds it",
        ),
        ({"environment__Dockerfile__x": ""}, "environment/Dockerfile: error: not a regular file"),
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


@pytest.mark.parametrize("part", ["environment", "tests"])
def test_links_that_lead_out_and_special_files_are_refused(tmp_path, part):
    folder = make(tmp_path / "t", environment__a="x", environment__b__c="y", tests__b__c="y")
    (folder / part / "inside").symlink_to("b/c")
    (folder / part / "b/up").symlink_to("..")
    assert messages(folder) == []
    for name, target in {
        "absolute": "/etc/passwd",
        "above": "../task.toml",
        "b/far": "../../../../etc",
        "over": "b/up/../instruction.md",
        "workspace": "/workspace/a",
    }.items():
        (folder / part / name).symlink_to(target)
    os.mkfifo(folder / part / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(folder / part / "socket"))
    found = messages(folder)
    assert sorted(line.split(": ")[0] for line in found) == sorted(
        f"{part}/{name}" for name in ("above", "absolute", "b/far", "over", "pipe", "socket", "workspace")
    )
    assert sum(f"leads out of {part}/" in line for line in found) == 5


@pytest.mark.parametrize("part", ["task.toml", "instruction.md", "environment", "tests"])
@pytest.mark.parametrize("target", ["../elsewhere", "beside", "/etc", "/proc/kmsg", "itself"])
def test_a_link_in_place_of_a_part_of_a_task_is_refused_and_not_read(tmp_path, part, target):
    folder = make(tmp_path / "t", environment__a="x")
    for place in (folder / "beside", tmp_path / "elsewhere"):
        if (folder / part).is_dir():
            shutil.copytree(folder / part, place)
        else:
            place.write_text("secret")
    shutil.rmtree(folder / part) if (folder / part).is_dir() else (folder / part).unlink()
    (folder / part).symlink_to(part if target == "itself" else target)
    task, problems = check_task(folder)
    (wrong,) = [problem for problem in problems if problem.file == str(folder / part)]
    assert task is None and wrong.severity == "error" and "a link" in wrong.message and "secret" not in str(problems)


def test_a_special_file_in_place_of_a_part_is_refused_and_not_waited_for(tmp_path):
    for part in ("task.toml", "instruction.md", "tests/test.sh", "environment", "tests"):
        folder = make(tmp_path / part.replace("/", "-"))
        shutil.rmtree(folder / part) if (folder / part).is_dir() else (folder / part).unlink(missing_ok=True)
        os.mkfifo(folder / part)
        assert check_task(folder)[0] is None, part


@pytest.mark.parametrize("part", ["environment", "tests"])
def test_a_link_that_leads_to_itself_is_named(tmp_path, part):
    folder = make(tmp_path / "t", environment__a="x")
    (folder / part / "self").symlink_to("self")
    (folder / part / "one").symlink_to("two")
    (folder / part / "two").symlink_to("one")
    named = ["warning: this link leads to itself: nothing can be read through it"] * 3
    assert [line.split(": ", 1)[1] for line in messages(folder)] == named


def test_test_sh_may_be_a_link_within_tests_and_no_other(tmp_path):
    folder = make(tmp_path / "t", tests__run_dot_bash="echo 1 > $VERIFIER_DIR/reward.txt\n")
    script = folder / "tests/test.sh"
    for target, expected in {
        "run.bash": [],
        "nowhere": ["tests/test.sh: error: this link leads to no file"],
        "test.sh": [
            "tests/test.sh: error: this link leads to no file",
            "tests/test.sh: warning: this link leads to itself: nothing can be read through it",
        ],
        "../../shared.sh": ["tests/test.sh: error: this link leads out of tests/, which the evaluator does not see"],
    }.items():
        script.unlink()
        script.symlink_to(target)
        assert messages(folder) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (b"#!/bin/bash\r\necho 1 > reward.txt\r\n", "tests/test.sh:1: error: this line ends in a carriage return"),
        (b"#!/bin/bash\necho 1\necho 2 > reward.txt\r\n", "tests/test.sh:3: error: this line ends in a carriage return"),
        (b"#!/bin/bash\recho 1 > reward.txt\r", "tests/test.sh:1: error: this line ends in a carriage return"),
        (b"\xef\xbb\xbf#!/bin/bash\necho 1 > reward.txt\n", "tests/test.sh:1: error: begins with a byte order mark"),
        ("#!/bin/bash\necho 1 > reward.txt".encode("utf-16"), "tests/test.sh:1: error: holds a NUL byte"),
        (b"# " + b"x" * 300_000, "tests/test.sh: error: 300,002 bytes; at most 262,144"),
    ],
)
def test_a_script_that_bash_cannot_run_is_refused(tmp_path, script, expected):
    folder = make(tmp_path / "t")
    (folder / "tests/test.sh").write_bytes(script)
    (found,) = messages(folder)
    assert found.startswith(expected)


def test_other_scripts_with_windows_lines_are_named(tmp_path):
    names = ("environment/run.sh", "environment/data.txt", "tests/judge", "tests/read_by_test.sh")
    folder = make(tmp_path / "t")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"true\r\nfalse\r\n" if name == names[-1] else b"#!/bin/sh\r\ntrue\r\n")
        (folder / name).chmod(0o755 if name in (names[0], names[2]) else 0o644)
    assert [line.split(": ")[0] for line in messages(folder)] == [f"{name}:1" for name in (names[0], names[2], names[3])]


def test_a_mark_at_the_start_of_a_text_is_not_part_of_it(tmp_path):
    folder = make(tmp_path / "t")
    for name in ("task.toml", "instruction.md"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert load_task(folder).instruction == "Say hello.\n"


@pytest.mark.parametrize("part", ["environment", "tests"])
def test_what_a_task_may_hold_is_bounded(tmp_path, part, monkeypatch):
    monkeypatch.setattr("qwengyre.sandbox.task_files.MAX_FOLDER_ENTRIES", 300)
    folder = make(tmp_path / "t", environment__a="x")
    with open(folder / part / "sparse", "wb") as file:
        file.truncate(2 * 2**30)
    assert messages(folder) == [f"{part}: error: more than 1,024 MiB: leave large data outside, and name it in harness.readable"]
    (folder / part / "sparse").unlink()
    deep = folder / part / "/".join(["d"] * 101)
    deep.mkdir(parents=True)
    assert messages(folder) == [f"{part}/d: error: more than 100 folders deep"]
    shutil.rmtree(folder / part / "d")
    for n in range(300):
        (folder / part / f"f{n}").touch()
    assert messages(folder) == [f"{part}: error: more than 300 files and folders"]


def test_what_an_environment_takes_is_known(tmp_path):
    task = load_task(make(tmp_path / "t", environment__a="12345", environment__b__c="123"))
    assert (task.environment_bytes, task.environment_files) == (8, 3)


def test_files_that_have_names_elsewhere_are_named(tmp_path):
    folder = make(tmp_path / "t", environment__a="x")
    os.link(folder / "environment/a", folder / "environment/b")
    assert messages(folder) == []
    (tmp_path / "elsewhere").write_text("x")
    os.link(tmp_path / "elsewhere", folder / "environment/c")
    (found,) = messages(folder)
    assert found.startswith("environment: warning: 1 files have other names elsewhere (hard links)")
    assert load_task(folder).name == "t"


@pytest.mark.parametrize(
    "toml",
    [
        "a = " + "[" * 5000,
        "a = " + "9" * 5000,
        "[agent]\ntimeout_sec = 0x" + "f" * 5000,
        "[agent]\ntimeout_sec = 1" + "0" * 400,
        "[metadata]\nreward_range = [0, 1" + "0" * 400 + "]",
        "[verifier.env]\nA = '" + "x" * 40_000 + "'",
        "\n".join(f"key{n} = 1" for n in range(20_000)),
        "a" + ".a" * 100_000 + " = 1",
        "a = '''\n[" + " " * 100_000 + "\n'''",
        "#" * 300_000,
    ],
    ids=range(10),
)
def test_a_task_toml_made_to_break_a_reader_is_named_and_soon(tmp_path, toml):
    task, problems = check_task(make(tmp_path / "t", toml))
    assert (task is None) == any(problem.severity == "error" for problem in problems)
    assert all(len(str(problem)) < 1000 for problem in problems) and len(problems) < 100


def test_links_to_tasks_are_named(tmp_path):
    make(tmp_path / "real/a")
    make(tmp_path / "tasks/b")
    (tmp_path / "tasks/a").symlink_to("../real/a")
    (tmp_path / "tasks/more").symlink_to("../real")
    (tmp_path / "tasks/loop").symlink_to("loop")
    tasks, problems = check_tasks(tmp_path / "tasks")
    assert [task.name for task in tasks] == ["b"]
    assert [(Path(problem.file).name, problem.severity) for problem in problems] == [("a", "error"), ("more", "warning")]
    with pytest.raises(ConfigError, match="a link to a task, which is not followed"):
        load_tasks(tmp_path / "tasks")


def test_a_link_that_a_user_names_is_followed(tmp_path):
    make(tmp_path / "real/a")
    (tmp_path / "mine").symlink_to("real")
    (tmp_path / "one").symlink_to("real/a")
    assert [task.name for task in load_tasks(tmp_path / "mine")] == ["a"]
    (task,) = load_tasks(tmp_path / "one")
    assert task.folder == str(tmp_path / "real/a")


@pytest.mark.parametrize("name", ["a\nerror: fake", "\x1b[2Jgone", os.fsdecode(b"\xff"), "tab\t"])
def test_names_that_cannot_be_shown_are_refused_in_one_plain_line(tmp_path, name):
    tasks, problems = check_tasks(make(tmp_path / name).parent)
    assert tasks == [] and len(problems) == 1
    shown = str(problems[0])
    assert shown.isprintable() and shown.encode() and "the name of a task must be UTF-8 without control characters" in shown


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
