"""The `[sandbox.harbor]` table of a run file."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

from qwengyre.core.ids import LocalPath

IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:Class`, as Harbor takes it in place of a name."""
NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*")
"""How Harbor's agents and environments are called. Which there are the installed Harbor says."""
MODEL: Final = "{model}"

Options = dict[str, str | bool | int | float | list[str]]


class HarborConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which Harbor runs the trials of `sandbox.kind = "harbor"`, and how."""

    python: LocalPath = LocalPath("")
    """Interpreter of an environment that has Harbor 0.25 or 0.26 (Python 3.12 or newer), such as `.harbor/bin/python`."""
    agent: str = ""
    """One of Harbor's agents by name, such as `terminus-2`, or `module:Class`."""
    agent_kwargs: Options = {}
    """Options of the agent, as `harbor run --agent-kwarg` takes them."""
    agent_env: dict[str, str] = {}
    """More environment variables for the agent. Those of its model are set for each execution."""
    model_name: str = "openai/{model}"
    """What the agent is told that its model is: Harbor reads the provider, and so the API, from what stands before the slash
    (`anthropic/{model}` for `claude-code`)."""
    environment: str = "docker"
    """One of Harbor's environments by name (`docker`, `podman`, `daytona` ...), or `module:Class`."""
    environment_kwargs: Options = {}
    """Options of the environment, as `harbor run --environment-kwarg` takes them."""
    path: tuple[LocalPath, ...] = ()
    """More folders to import agents and environments from."""
    max_trials: int = 64
    """Trials at once, those whose environment starts or whose verifier runs included. `runtime.max_concurrent_harnesses` is how many of
    their agents run at once."""
    start_timeout_s: float = 1800.0
    """From a trial's start to its agent's: building or pulling its image, and installing the agent. Part of no other timeout."""

    def __post_init__(self) -> None:
        for name in ("agent", "environment"):
            value = getattr(self, name)
            if value and not (NAME.fullmatch(value) or IMPORT_PATH.fullmatch(value)):
                raise ValueError(f"{name}: {value!r} is neither a name of Harbor's, such as {EXAMPLES[name]}, nor module:Class")
        if self.model_name.count(MODEL) != 1:
            raise ValueError("model_name must hold {model} once, such as openai/{model}")
        for variable, value in self.agent_env.items():
            if not variable or "=" in variable or "\0" in variable + value or "${" in value:
                raise ValueError(
                    f"agent_env: {variable!r} cannot be a variable: no empty name, no `=` in it, no NUL byte, no ${{...}}"
                )
        if self.max_trials < 1:
            raise ValueError("max_trials must be at least 1")
        if not (math.isfinite(self.start_timeout_s) and self.start_timeout_s > 0):
            raise ValueError("start_timeout_s must be above 0 and finite")


EXAMPLES: Final = {"agent": "terminus-2", "environment": "podman"}
