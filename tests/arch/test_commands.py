"""Every line of a command table leads to a function with help."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from qwengyre.cli.main import COMMANDS
from tests.arch.source import expect_none


def faults(commands: Mapping, prefix: str) -> list[str]:
    found = []
    for name, (target, _) in commands.items():
        module, _, attribute = target.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            found.append(f"{prefix} {name}: {error}")
            continue
        if isinstance(command, Mapping):
            found += faults(command, f"{prefix} {name}")
        elif not (command.__doc__ or "").strip():
            found.append(f"{prefix} {name}: no docstring")
    return found


def test_every_command_is_there_and_says_what_it_does():
    expect_none(faults(COMMANDS, "qwengyre"))
