"""The [sandbox] table: which kinds there are, and what contradicts them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from qwengyre.core.errors import EvaluatorFailed
from qwengyre.core.records import End
from qwengyre.runtime.run_config import RunConfig
from qwengyre.sandbox.harbor.ends import agent_end, score_of

HARBOR = {"python": "/venv/bin/python", "agent": "terminus-2"}


def convert(sandbox: dict[str, Any], **tables: Any) -> RunConfig:
    return msgspec.convert({"tasks": {"family": "mini-repositories"}, "harness": {}, "sandbox": sandbox, **tables}, RunConfig)


@pytest.mark.parametrize(
    ("sandbox", "reason"),
    [
        ({}, "harness.command must not be empty"),
        ({"kind": "docker"}, "Invalid enum value 'docker'"),
        ({"kind": "harbor"}, 'kind = "harbor" needs python in [sandbox.harbor]'),
        ({"kind": "harbor", "harbor": {"python": "/p"}}, 'kind = "harbor" needs agent in [sandbox.harbor]'),
        ({"kind": "harbor", "harbor": HARBOR, "image": "a"}, "image contradict each other"),
        ({"kind": "harbor", "harbor": HARBOR, "hosts": 2}, "hosts contradict each other"),
        ({"kind": "harbor", "harbor": {**HARBOR, "colour": 1}}, "unknown field `colour`"),
        ({"kind": "harbor", "harbor": {**HARBOR, "agent": "Terminus 2"}}, "neither a name of Harbor's, such as terminus-2"),
        ({"kind": "harbor", "harbor": {**HARBOR, "environment": "a.b"}}, "neither a name of Harbor's, such as podman"),
        ({"kind": "harbor", "harbor": {**HARBOR, "model_name": "openai/policy"}}, "model_name must hold {model} once"),
        ({"kind": "harbor", "harbor": {**HARBOR, "agent_env": {"A": "${HOME}"}}}, "agent_env: 'A' cannot be a variable"),
        ({"kind": "harbor", "harbor": {**HARBOR, "max_trials": 0}}, "max_trials must be at least 1"),
        ({"kind": "harbor", "harbor": {**HARBOR, "start_timeout_s": 0}}, "start_timeout_s must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(sandbox: dict[str, Any], reason: str):
    with pytest.raises(msgspec.ValidationError, match=re.escape(reason)):
        convert(sandbox)


def test_harbor_needs_no_command_and_a_port():
    config = convert({"kind": "harbor", "harbor": HARBOR})
    assert config.has_harnesses_outside


def test_a_reward_hook_has_no_workspace_of_harbors():
    with pytest.raises(msgspec.ValidationError, match="Harbor leaves in its environments"):
        convert({"kind": "harbor", "harbor": HARBOR}, hooks={"reward": "m:f"})


@pytest.mark.parametrize(
    ("error", "end"),
    [
        ("", End.EXITED),
        ("AgentTimeoutError", End.HARNESS_TIMEOUT),
        ("NonZeroAgentExitCodeError", End.CRASHED),
        ("AnythingElse", End.CRASHED),
        ("GKEPodNotFoundError", End.SETUP_FAILED),
    ],
)
def test_ends_of_agents(error: str, end: End):
    assert agent_end(error, "said", 5.0).end is end


@pytest.mark.parametrize("rewards", [{"a": 1.0, "b": 0.0}, {"reward": 2.0}, {"reward": float("nan")}, {"reward": float("inf")}])
def test_what_is_no_score(rewards: dict[str, float]):
    with pytest.raises(EvaluatorFailed):
        score_of(rewards, 0.0, 1.0)
