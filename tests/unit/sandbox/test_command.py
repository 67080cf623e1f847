"""What a command line says before anything is run."""

from __future__ import annotations

import pytest

from qwengyre.sandbox.command import PLACEHOLDERS, Runs, first_program, runs, unknown_placeholders, wrong_placeholder


@pytest.mark.parametrize(
    ("part", "wrong", "meant"),
    [
        ("{instruktion}", "{instruktion}", "{instruction}"),
        ("--task={Instruction}", "{Instruction}", "{instruction}"),
        ("{ instruction }", "{ instruction }", "{instruction}"),
        ("{instruction}/{workspce}", "{workspce}", "{workspace}"),
        ("{instruction_fil}", "{instruction_fil}", "{instruction_file}"),
        ("openai/{modle}", "{modle}", "{model}"),
        ("{prompt}", "{prompt}", "{instruction}"),
        ("{cwd}/x", "{cwd}", "{workspace}"),
        ("@{file}", "{file}", "{instruction_file}"),
    ],
)
def test_a_placeholder_that_is_misspelt_or_called_as_elsewhere_is_found(part: str, wrong: str, meant: str):
    assert wrong_placeholder(part) == (wrong, meant)


@pytest.mark.parametrize(
    "part",
    [
        *PLACEHOLDERS,
        "a {instruction} b {model}",
        "${workspace}",
        "${HOME}/x",
        "{{task}}",
        '{"task": 1}',
        "{}",
        "{0}",
        "{unheard_of}",
        r"\{task}",
        "task",
    ],
)
def test_what_is_no_placeholder_is_left_alone(part: str):
    assert wrong_placeholder(part) is None


def test_unheard_of_placeholders_are_worth_a_note():
    assert unknown_placeholders(["a", "{x}", "{instruction} {seed}", "${y}"]) == ["{x}", "{seed}"]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python3", "agent.py", "-c"], Runs("file", "agent.py")),
        (["/opt/v/bin/python3.12", "-u", "-X", "dev", "/opt/a.py"], Runs("file", "/opt/a.py")),
        (["python", "-m", "agent.cli", "x"], Runs("module", "agent.cli")),
        (["python3", "-Im", "agent"], Runs("module", "agent")),
        (["python3", "-c", "print()"], Runs("code", "print()")),
        (["bash", "-lc", "agent x"], Runs("code", "agent x")),
        (["bash", "-o", "pipefail", "-c", "agent"], Runs("code", "agent")),
        (["sh", "run.sh"], Runs("file", "run.sh")),
        (["node", "--require", "a.js", "b.js"], Runs("file", "b.js")),
        (["node", "--eval", "1"], Runs("code", "1")),
        (["perl", "-I", "lib", "a.pl"], Runs("file", "a.pl")),
        (["python3"], None),
        (["python3", "-"], None),
        (["my-agent", "agent.py"], None),
        (["pythonic", "agent.py"], None),
    ],
)
def test_what_an_interpreter_is_given_to_run(command: list[str], found: Runs | None):
    assert runs(command) == found


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("my-agent --task x", "my-agent"),
        ("A=1 B='2 3' /opt/agent | tee log", "/opt/agent"),
        ("# a comment\nexec agent", "exec"),
        ("./run.sh", "./run.sh"),
        ("PATH=/opt/bin:$PATH agent", None),
        ("$AGENT x", None),
        ("A=1", None),
        ("f() { :; }; f", None),
        ("'unclosed", None),
        ("", None),
    ],
)
def test_the_program_that_a_shell_starts_with(code: str, program: str | None):
    assert first_program(code) == program
