"""Records that cross folder boundaries, in the order of the data.

Arrays carry their axes: `T` tokens of one path or row, `S` sampled tokens of one call.
All records are frozen and encode with msgspec (msgpack in journals and between processes). Token arrays are
numpy arrays packed by `core.arrays`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from qwengyre.core.ids import ExecutionId, GroupId, MicroStepId

CONTEXT_VERSION = -1
"""Version of a token that no policy of this run generated."""


class Role(Enum):
    """What a path is for. The order is the sampling priority of the paper (trajectory processor)."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    SIDE = "side"
    """Title, memory, commit calls: served and recorded, outside the training tree."""


ROLE_PRIORITY: tuple[Role, ...] = (Role.MAIN, Role.MAIN_SUMMARY, Role.SUB_AGENT, Role.SUB_AGENT_SUMMARY)


class Validity(Enum):
    """Whether a score may be trained on."""

    VALID = "valid"
    """The evaluator returned a legal score of the workspace, 0 included."""
    PLACEHOLDER = "placeholder"
    """There was nothing to evaluate: reward 0, nothing to train, but the execution counts."""
    DROPPED = "dropped"
    """Overall timeout, or the evaluator failed beyond its retries: out of the baseline and of training."""


class End(Enum):
    """How an execution ended, as seen from outside the harness."""

    EXITED = "exited"
    HARNESS_TIMEOUT = "harness_timeout"
    OVERALL_TIMEOUT = "overall_timeout"
    CRASHED = "crashed"
    NEVER_CALLED = "never_called"
    EVALUATOR_FAILED = "evaluator_failed"
    SETUP_FAILED = "setup_failed"
    LOST = "lost"
    """A process of ours that it needs died: nothing of it counts, and it is dispatched again."""


class Outcome(msgspec.Struct, frozen=True):
    """What the sandbox says of one finished execution: score, validity and what was scored are three fields."""

    end: End
    validity: Validity
    score: float
    """In [0, 1] unless the task says otherwise; 0.0 when not VALID."""
    scored_state: str
    """Reference to the state that was scored (digest of the workspace), empty if none was."""
    duration_s: float
    exit_code: int | None = None
    detail: str = ""
    """What a user should read when the end is not EXITED: last lines of output, the evaluator's error."""
    evaluator_tries: int = 1
    task_score: float | None = None
    """What the task's evaluator said, where a reward hook made `score` of it."""


class PathSegment(msgspec.Struct, frozen=True):
    """`num_tokens` consecutive tokens of tree node `node`, from its first token on.

    Two paths of one tree share a prefix exactly where their leading segments are equal: no token is compared again.
    """

    node: int
    num_tokens: int


class Trajectory(msgspec.Struct, frozen=True):
    """One chosen root-to-leaf path. Arrays are little-endian bytes; use `core.arrays` to read them.

    `trainable_T` is True where the token was sampled by the policy, trainable, and not yet masked by an earlier
    trajectory of the same execution (deduplicated). `logprob_T` is the recorded behavior log-prob, 0 elsewhere;
    `version_T` the policy version that sampled the token, CONTEXT_VERSION elsewhere.
    """

    role: Role
    segments: tuple[PathSegment, ...]
    token_ids_T: bytes
    """int32"""
    trainable_T: bytes
    """bool"""
    logprob_T: bytes
    """float32"""
    version_T: bytes
    """int32"""
    routes_T: bytes = b""
    """uint8 (T, B): the experts that each token went to when it was computed, router by router; 255 where nobody told. Empty: of none."""

    @property
    def num_tokens(self) -> int:
        return len(self.trainable_T)


class TrainingExecution(msgspec.Struct, frozen=True):
    """Everything the trainer needs of one execution: its trajectories share one tree and one advantage."""

    execution: ExecutionId
    group: GroupId
    advantage: float
    temperature: float
    """The temperature that was sampled at; the trainer divides logits by it."""
    trajectories: tuple[Trajectory, ...]
    num_trainable: int
    """T_e: trainable tokens over all trajectories of this execution, also when it is cut over micro-steps."""


class MicroStep(msgspec.Struct, frozen=True):
    """The unit of training work that a cell claims: one execution's tree, or several of one group."""

    micro_step: MicroStepId
    step: int
    executions: tuple[TrainingExecution, ...]
    num_distinct_tokens: int
