"""Role rules of a user's own harness, read from the file that `trajectory.harness_rules` names."""

from __future__ import annotations

from pathlib import Path

from qwengyre.core.errors import ConfigError
from qwengyre.trajectory.harness_rules import BUILTIN, HarnessRules, rules_from_toml


def read_harness_rules(file: str) -> tuple[HarnessRules, ...]:
    """The rules in `file` before the built-in ones; the built-in ones alone for "". Raises ConfigError."""
    if not file:
        return BUILTIN
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read harness rules: {reason}", file=file, key="trajectory.harness_rules") from error
    return rules_from_toml(text, file)
