"""What others wrote reaches a terminal, a page or a log by the functions of core/text.py alone."""

from __future__ import annotations

import ast

from tests.arch.source import dotted, expect_none, modules

SINKS = {
    "print": {
        "qwengyre/bench",  # our own numbers
        "qwengyre/sandbox/zygote.py",  # in the place of a harness's interpreter
        "qwengyre/gateway/__main__.py",  # printable
        "qwengyre/warmup/__main__.py",  # to a pipe, by lines of ours
        "qwengyre_harness",  # runs inside a sandbox
        "qwengyre/cli/starter",  # runs inside a sandbox
    },
    "typer.echo": {"qwengyre/cli/output.py"},
    "typer.secho": {"qwengyre/cli/output.py"},
    "Console": {"qwengyre/bench"},
    "SafeConsole": {"qwengyre/cli", "qwengyre/dashboard/live.py"},
    "sys.stdout.write": {"qwengyre/cli/output.py"},
    "sys.stderr.write": set(),
    "logging.Formatter": set(),
    "logging.basicConfig": {"qwengyre/telemetry/log_lines.py"},
    "logging.StreamHandler": {"qwengyre/telemetry/log_lines.py"},
    "logging.FileHandler": {"qwengyre/telemetry/log_lines.py"},
    "warnings.warn": set(),
    "escape": {"qwengyre/core/text.py"},
}


def test_no_other_place_writes_to_a_terminal_or_into_a_page():
    found = []
    for module in modules("qwengyre", "qwengyre_harness"):
        for node in module.all_of(ast.Call):
            name = dotted(node.func)
            if name in SINKS and not any(str(module.path).startswith(place) for place in SINKS[name]):
                found.append(f"{module.path}:{node.lineno} calls {name}")
    expect_none(found)
