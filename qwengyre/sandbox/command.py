"""What a harness's command line says before anything is run: its placeholders, and what an interpreter in it is to run. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from qwengyre.core.near import nearest

PLACEHOLDERS: Final = ("{instruction}", "{instruction_file}", "{workspace}", "{model}")
"""What a command may contain; each is replaced inside any argument."""
MEANT: Final = {
    "{instruction}": ("task", "prompt", "problem", "problem_statement", "query", "question", "goal", "message", "input"),
    "{instruction_file}": ("file", "task_file", "prompt_file", "problem_file", "instruction_path", "instructions_file"),
    "{workspace}": ("cwd", "dir", "workdir", "directory", "folder", "repo", "working_dir", "workspace_dir"),
    "{model}": ("model_name", "policy", "model_id"),
}
"""What other tools call the same."""
IN_BRACES: Final = re.compile(r"(?<![{$\\])\{\s*([A-Za-z_]+)\s*\}(?!\})")
"""`{name}`, but not a shell's `${name}` nor a template's `{{name}}`."""


class Runs(NamedTuple):
    """What an interpreter is given to run."""

    kind: Literal["file", "module", "code"]
    what: str


class Interpreter(NamedTuple):
    """How an interpreter reads its command line: options that take code or a module, and others that take a value."""

    code: str
    module: str
    with_value: tuple[str, ...]


SHELL: Final = Interpreter("c", "", ("-o", "-O", "+o", "+O", "--rcfile", "--init-file"))
INTERPRETERS: Final = {
    "python": Interpreter("c", "m", ("-W", "-X", "--check-hash-based-pycs")),
    "bash": SHELL,
    "sh": SHELL,
    "dash": SHELL,
    "zsh": SHELL,
    "node": Interpreter("ep", "", ("-r", "--require", "--import", "--loader", "--env-file", "-C", "--conditions")),
    "ruby": Interpreter("e", "", ("-I", "-r", "-C")),
    "perl": Interpreter("eE", "", ("-I",)),
}
SHELLS: Final = ("bash", "sh", "dash", "zsh")


def wrong_placeholder(part: str) -> tuple[str, str] | None:
    """The first `{name}` of an argument that is surely meant as a placeholder and is not one, and the one that was meant.

    >>> wrong_placeholder("--task={instruktion}"), wrong_placeholder("${HOME}/{model}")
    (('{instruktion}', '{instruction}'), None)
    """
    for found in IN_BRACES.finditer(part):
        if found[0] not in PLACEHOLDERS and (meant := _meant(found[1].lower())):
            return found[0], meant
    return None


def unknown_placeholders(command: Sequence[str]) -> list[str]:
    """Every `{name}` that the harness gets as it is: it may be meant so."""
    return [found[0] for part in command for found in IN_BRACES.finditer(part) if found[0] not in PLACEHOLDERS]


def _meant(name: str) -> str | None:
    if f"{{{name}}}" in PLACEHOLDERS:
        return f"{{{name}}}"
    for placeholder, others in MEANT.items():
        if name in others:
            return placeholder
    near = nearest(name, [placeholder.strip("{}") for placeholder in PLACEHOLDERS], cutoff=0.75)
    return f"{{{near}}}" if near else None


def interpreter_of(program: str) -> str | None:
    """
    >>> interpreter_of("/usr/bin/python3.11"), interpreter_of("my-agent")
    ('python', None)
    """
    name = program.rsplit("/", 1)[-1].rstrip("0123456789.")
    return name if name in INTERPRETERS else None


def runs(command: Sequence[str]) -> Runs | None:
    """What the interpreter that `command` starts with is to run; None for another program, and for an interpreter given nothing.

    >>> runs(["python3", "-I", "-m", "agent", "x"]), runs(["bash", "-lc", "my-agent"]), runs(["node", "a.js", "-e"])
    (Runs(kind='module', what='agent'), Runs(kind='code', what='my-agent'), Runs(kind='file', what='a.js'))
    """
    name = interpreter_of(command[0])
    if name is None:
        return None
    rules, rest = INTERPRETERS[name], iter(command[1:])
    for word in rest:
        if word == "--":
            continue
        if word in rules.with_value:
            next(rest, None)
        elif word.startswith("-") and len(word) > 1:
            if word.startswith("--"):
                if word in ("--eval", "--print"):
                    return Runs("code", next(rest, ""))
            elif word[-1] in rules.code:
                return Runs("code", next(rest, ""))
            elif rules.module and word[-1] in rules.module:
                return Runs("module", next(rest, ""))
        elif word != "-":
            return Runs("file", word)
        else:
            return None
    return None


def first_program(code: str) -> str | None:
    """The program that a shell's code starts with, None when that cannot be told without running it.

    >>> first_program("LANG=C my-agent --task x | tee log"), first_program("for x in 1; do :; done"), first_program("$AGENT x")
    ('my-agent', 'for', None)
    """
    try:
        words = shlex.split(code, comments=True)
    except ValueError:
        return None
    given = list(itertools.takewhile(re.compile(r"[A-Za-z_]\w*=").match, words))
    if any(word.startswith("PATH=") for word in given) or len(given) == len(words):
        return None
    word = words[len(given)]
    return word if re.fullmatch(r"[\w./+-]+", word) else None
