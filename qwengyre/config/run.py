"""The run file as a whole: one table per component, each owned by its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from qwengyre.config.load import load
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.trainer.config import TrainerConfig


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a run depends on. Written back to the run folder as resolved."""

    runtime: RuntimeConfig = RuntimeConfig()
    trainer: TrainerConfig = TrainerConfig()


def load_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read the run file at `path`; `overrides` are "table.key=value". Raises ConfigError with file, line and key."""
    return load(path, RunConfig, overrides)
