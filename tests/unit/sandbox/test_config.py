"""The [harness] table: what it refuses."""

from __future__ import annotations

import re

import msgspec
import pytest

from qwengyre.sandbox.config import HarnessConfig


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"command": [""]}, "command must not be empty"),
        ({"command": ["a\0b"]}, "NUL byte"),
        ({"command": ["a", "--task={instruktion}"]}, "command: {instruktion} is not a placeholder. Did you mean {instruction}?"),
        ({"command": ["a"], "env": {"A=B": "x"}}, "env: 'A=B' cannot be a variable"),
        ({"command": ["a"], "env": {"A": "x\0"}}, "env: 'A' cannot be a variable"),
        ({"command": ["a"], "readable": ["relative"]}, "not an absolute path"),
        ({"command": ["a"], "warm_start": True}, "warm_start needs command"),
        ({"command": ["a"], "warm_modules": ["openai"]}, "warm_modules needs warm_start"),
        ({"command": ["a"], "timeout_s": 0}, "timeout_s must be above 0"),
        ({"command": ["a"], "overall_timeout_s": -1.0}, "overall_timeout_s must be above 0"),
        ({"command": ["a"], "evaluator_tries": 0}, "evaluator_tries must be at least 1"),
        ({"command": ["a"], "isolation": "docker"}, "Invalid enum value"),
        ({"command": ["a"], "limits": {"memory_mb": 0}}, "memory_mb must be at least 1"),
        ({"command": ["a"], "limits": {"memory_mb": 256}}, "memory_mb must be above disk_mb, which is part of it"),
        ({"command": ["a"], "limits": {"workspace": "nfs"}}, "Invalid enum value 'nfs'"),
        ({"command": ["a"], "colour": 1}, "unknown field"),
        ({"command": "a b"}, "Expected `array`"),
    ],
)
def test_what_cannot_be_is_refused(settings, reason):
    with pytest.raises(msgspec.ValidationError, match=re.escape(reason)):
        msgspec.convert(settings, HarnessConfig)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["python3", "-m", "agent", "x"], "agent"),
        (["/opt/v/bin/python3.12", "-m", "agent.cli"], "agent.cli"),
        (["python3", "agent.py"], None),
        (["agent", "-m", "x"], None),
    ],
)
def test_module_of_a_command(command, module):
    assert msgspec.convert({"command": command}, HarnessConfig).module == module
