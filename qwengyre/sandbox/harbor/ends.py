"""What a trial of Harbor came to, in our words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from qwengyre.core.errors import EvaluatorFailed
from qwengyre.core.records import End, Outcome, Validity

TIMEOUT: Final = "AgentTimeoutError"
ENVIRONMENT_FAILED: Final = frozenset(
    {
        "EnvironmentStartTimeoutError",
        "GKEExecStreamClosedError",
        "GKEPodNotFoundError",
        "HealthcheckError",
        "MissingExtraError",
        "RuntimeRequestError",
        "SSHAccessError",
        "SandboxBuildFailedError",
        "ServiceOperationsUnsupportedError",
        "VercelScopeError",
    }
)
"""Exceptions that say that the environment went, while an agent ran in it or later. What else ends an agent is the agent's."""

NO_REWARD: Final = frozenset(
    {"RewardFileEmptyError", "RewardFileNotFoundError", "VerifierOutputParseError", "VerifierTimeoutError"}
)
"""Exceptions of a verifier that ran, and gave no reward. What it runs on may make it do so."""


class AgentEnd(msgspec.Struct, frozen=True):
    """How an agent ended."""

    end: End
    detail: str = ""

    @property
    def is_lost_with_its_environment(self) -> bool:
        return self.end is End.SETUP_FAILED


class TrialResult(msgspec.Struct, frozen=True):
    """What the trial host says of a trial that is over (`trial_host.py`)."""

    rewards: dict[str, float] | None
    is_verified: bool
    """Its verifier was started."""
    error: str
    """Type of the first exception of the trial, its agent's included; empty without one."""
    message: str

    @property
    def gave_none(self) -> bool:
        """Its verifier ran, and gave nothing that counts."""
        return self.is_verified and (bool(self.rewards) or self.error in NO_REWARD)

    @property
    def said(self) -> str:
        return f"{self.error}: {self.message}".strip() if self.error else ""


def agent_end(error: str, message: str, timeout_s: float) -> AgentEnd:
    """`error` is the type of the exception that ended the agent, empty when none did."""
    if not error:
        return AgentEnd(End.EXITED)
    if error == TIMEOUT:
        return AgentEnd(End.HARNESS_TIMEOUT, f"the agent was stopped after {timeout_s:g} s")
    if error in ENVIRONMENT_FAILED:
        return AgentEnd(End.SETUP_FAILED, f"the environment failed while the agent ran: {error}: {message}")
    return AgentEnd(End.CRASHED, f"{error}: {message}")


def score_of(rewards: Mapping[str, float], low: float, high: float) -> float:
    """The number at `reward`, or the only one. Raises EvaluatorFailed for another form, and for one that is not in [low, high].

    >>> score_of({"reward": 0.5, "tests": 3}, 0.0, 1.0), score_of({"tests": 1}, 0.0, 1.0)
    (0.5, 1.0)
    """
    if "reward" not in rewards and len(rewards) != 1:
        raise EvaluatorFailed(
            f"the verifier gave {len(rewards)} rewards ({', '.join(sorted(rewards))}), and none is called reward"
        )
    value = float(rewards.get("reward", next(iter(rewards.values()))))
    if not (math.isfinite(value) and low <= value <= high):
        raise EvaluatorFailed(
            f"the verifier gave {value}, outside [{low:g}, {high:g}]; a task with other scores sets reward_range in [metadata]"
        )
    return value


def not_scored(end: End, validity: Validity, detail: str, *, tries: int = 0) -> Outcome:
    return Outcome(end, validity, 0.0, "", 0.0, detail=detail, evaluator_tries=tries)


def never_called(ended: AgentEnd) -> Outcome:
    detail = (
        "the agent ended without a model call: can its environment reach the gateway (gateway.public_url), and does its API go with "
        f"sandbox.harbor.model_name?\n{ended.detail}"
    )
    return not_scored(End.NEVER_CALLED, Validity.DROPPED, detail.strip())
