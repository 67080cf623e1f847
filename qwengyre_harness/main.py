"""Command line of the reference harness."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from qwengyre_harness.agent import Agent, Limits
from qwengyre_harness.chat import Chat, prepared_client
from qwengyre_harness.tools import Folder

_ABOUT = """\
A small coding agent. It works in the current folder with the tools write_file, read_file, run and delegate, over Chat
Completions at $OPENAI_BASE_URL with $OPENAI_API_KEY. It ends when the model answers without calling a tool (exit code 0),
out of turns (0 too: the workspace is what counts), or when the server refuses it for good (1)."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwengyre_harness", description=_ABOUT, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("task", nargs="?", default="-", help="what to do; - reads it from standard input")
    add("--task-file", type=Path, help="read what to do from this file instead")
    add("--model", default=os.environ.get("OPENAI_MODEL", "policy"), help="model name to ask for")
    add("--context-limit", type=int, default=100_000, metavar="TOKENS", help="summarize a context that has grown past this")
    add("--max-turns", type=int, default=500, help="model calls that one agent may make")
    add("--max-depth", type=int, default=1, help="how deep agents may delegate; 0 switches delegation off")
    add("--after-change", default="", metavar="COMMAND", help="run after every file written, and show the model its output")
    add("--command-timeout", type=float, default=600.0, metavar="SECONDS", help="stop a command that runs longer")
    add("--max-output", type=int, default=20_000, metavar="CHARACTERS", help="cut the middle out of longer tool results")
    add("--no-stream", action="store_true", help="ask for whole replies instead of streamed ones")
    add("--retries", type=int, default=8, help="tries after a failed request, with growing pauses")
    add("--request-timeout", type=float, default=3600.0, metavar="SECONDS", help="longest silence of the server")
    return parser


def preload() -> None:
    """Do all that does not depend on address, key or task, so that processes forked from this one start at once."""
    prepared_client()
    _parser()


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    client = prepared_client().with_options(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key=os.environ.get("OPENAI_API_KEY", "none"),
        max_retries=options.retries, timeout=options.request_timeout,
    )  # fmt: skip
    chat = Chat(client, options.model, streamed=not options.no_stream)
    folder = Folder(Path.cwd(), options.after_change, options.command_timeout, options.max_output)
    limits = Limits(options.context_limit, options.max_turns, options.max_depth)
    try:
        print(Agent(chat.complete, folder, limits).work(_task(options)))
    except client_errors() as error:
        print(f"qwengyre_harness: {error}", file=sys.stderr)
        return 1
    return 0


def client_errors() -> tuple[type[Exception], ...]:
    from openai import APIError

    return (APIError,)


def _task(options: argparse.Namespace) -> str:
    if options.task_file:
        return str(options.task_file.read_text(encoding="utf-8")).strip()
    return sys.stdin.read().strip() if options.task == "-" else str(options.task)
