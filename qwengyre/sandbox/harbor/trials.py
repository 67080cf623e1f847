"""What Harbor is told of one execution: a TrialConfig of Harbor's as JSON, and the variables of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from qwengyre.core.errors import SandboxError
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harbor.config import MODEL, HarborConfig
from qwengyre.sandbox.harness import PATIENCE, ExecutionSpec, GatewayAddress

NO_AGENT: Final = {"name": "nop"}
"""Harbor's agent that does nothing."""


def agent_of(config: HarborConfig) -> dict[str, Any]:
    """The agent, without a model."""
    key = "import_path" if ":" in config.agent else "name"
    return {key: config.agent, "kwargs": dict(config.agent_kwargs), "env": dict(config.agent_env)}


def environment_of(config: HarborConfig) -> dict[str, Any]:
    key = "import_path" if ":" in config.environment else "type"
    return {key: config.environment, "kwargs": dict(config.environment_kwargs)}


def model_variables(gateway: GatewayAddress, spec: ExecutionSpec) -> dict[str, str]:
    """Where the agent of this execution finds its model, under each name that Harbor's agents look for. Raises SandboxError."""
    if not gateway.url:
        raise SandboxError("Harbor's environments reach the gateway by its TCP port, and it has none")
    base = gateway.url.rstrip("/") + spec.base_path
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": spec.key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_BASE": base,
        "ANTHROPIC_API_KEY": spec.key,
        "ANTHROPIC_AUTH_TOKEN": spec.key,
        "GOOGLE_BASE_URL": base,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_BASE": base,
        "GEMINI_API_KEY": spec.key,
        "GOOGLE_API_KEY": spec.key,
    }


class Trials:
    """Builds what the trials of one launcher are told. Their folders are in `work`."""

    def __init__(self, config: HarborConfig, harness: HarnessConfig, work: Path):
        self._config, self._harness, self._work = config, harness, work

    def agent_timeout_s(self, spec: ExecutionSpec) -> float:
        return self._harness.timeout_s or spec.task.agent_timeout_s

    def run(self, name: str, spec: ExecutionSpec, variables: dict[str, str]) -> dict[str, Any]:
        """The trial of an execution."""
        agent = agent_of(self._config) | {
            "model_name": self._config.model_name.replace(MODEL, spec.model),
            "override_timeout_sec": self.agent_timeout_s(spec),
        }
        agent["env"] = PATIENCE | spec.task.agent_env | self._config.agent_env | variables
        return self._trial(name, spec) | {"agent": agent}

    def regrade(self, name: str, spec: ExecutionSpec, graded: str) -> dict[str, Any]:
        """A run of the verifier alone, on what the trial called `graded` left."""
        source = {"action": "regrade", "type": "local", "path": str(self._work / graded)}
        return self._trial(name, spec) | {"agent": NO_AGENT, "source_trial": source}

    def untouched(self, name: str, spec: ExecutionSpec) -> dict[str, Any]:
        """The verifier on an environment in which nobody has done anything."""
        return self._trial(name, spec) | {"agent": NO_AGENT}

    def _trial(self, name: str, spec: ExecutionSpec) -> dict[str, Any]:
        verifier = {"override_timeout_sec": self._harness.verifier_timeout_s or spec.task.verifier_timeout_s}
        return {
            "task": {"path": spec.task.folder},
            "trial_name": name,
            "trials_dir": str(self._work),
            "environment": environment_of(self._config),
            "verifier": verifier,
        }
