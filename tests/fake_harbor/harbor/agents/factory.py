"""Agents by name."""

from __future__ import annotations

import asyncio
import shlex
import sys
from types import SimpleNamespace
from typing import Any

PROBE = "import os, sys\nexec(sys.argv[1])\nsys.stdout.flush()\n"


class NonZeroAgentExitCodeError(RuntimeError):
    pass


class Agent:
    """Runs its instruction as Python in the environment. Its option `setup` is Python, too, run here before it is installed."""

    OPTIONS = frozenset({"setup", "raises"})

    def __init__(self, config: Any) -> None:
        self.kwargs, self.extra_env = config.kwargs, config.env

    @classmethod
    def preflight(cls, kwargs: dict[str, Any], env: dict[str, str]) -> None:
        if unknown := kwargs.keys() - cls.OPTIONS:
            raise ValueError(f"Invalid kwargs for agent: Unknown option {sorted(unknown)[0]!r}.")

    async def setup(self, environment: Any) -> None:
        exec(self.kwargs.get("setup", ""), {"asyncio": asyncio})

    async def run(self, instruction: str, environment: Any) -> None:
        if name := self.kwargs.get("raises"):
            raise type(name, (Exception,), {})("as the test wants it")
        code = await environment.exec(shlex.join([sys.executable, "-c", PROBE, instruction]), self.extra_env)
        if code:
            raise NonZeroAgentExitCodeError(f"Command failed (exit {code})")


class NopAgent(Agent):
    async def run(self, instruction: str, environment: Any) -> None:
        pass


class AgentFactory:
    NAMES = {"probe": Agent, "nop": NopAgent}  # noqa: RUF012

    @classmethod
    def get_agent_class_from_config(cls, config: SimpleNamespace) -> type[Agent]:
        if config.name not in cls.NAMES:
            raise ValueError(f"Agent name {config.name} is not valid. Valid agent names: {set(cls.NAMES)}")
        return cls.NAMES[config.name]
