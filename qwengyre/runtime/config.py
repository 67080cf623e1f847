"""What the runtime itself needs to know: where things are, how long to wait, what to keep."""

from __future__ import annotations

from typing import Literal

import msgspec

from qwengyre.core.ids import LocalPath, ModelPlace


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = "run"
    """Name of the run; the run folder is `<runs dir>/<name>-<date>`."""
    seed: int = 0
    """Fixes tasks, sampling of tokens and of trajectories."""
    launcher: Literal["local", "ray"] = "local"
    """How cells are started. `local`: a supervisor of processes on this machine. `ray`: on the nodes of a Ray cluster (`[ray]`)."""
    threads_per_cell: int = 1
    """CPU threads that torch may use in one cell."""
    start_timeout_s: float = 120.0
    """Longest wait for a cell or the gateway to come up."""
    operation_timeout_s: float = 120.0
    """Longest wait for one control operation of a cell (a role switch, a snapshot, a checkpoint)."""
    compute_timeout_s: float = 600.0
    """Longest wait for one micro-step."""
    collective_timeout_s: float = 30.0
    """Longest wait of a member for the others in one collective."""
    heartbeat_s: float = 2.0
    """Seconds between two heartbeats of a cell or the gateway. One that misses three in a row, each after 5 heartbeats, counts as lost
    and is started again."""
    restart_lost_cells: bool = True
    """Start a lost cell again; it comes back in the rollout role."""
    max_concurrent_harnesses: int = 64
    """Most harness processes at once on this machine."""
    give_up_after: int = 16
    """Executions in a row that never called the model, could not be set up or could not be scored: then the run stops. 0: never."""
    keep_checkpoints: int = 3
    """How many checkpoints stay on disk."""
    audit_logprobs: bool = True
    """At the end, compare every trained log-prob with a trainer forward under the version that sampled it.

    Keeps the weights of every version on disk until then: switch it off for large models or many steps.
    """
    permute_rewards: bool = False
    """Control experiment: shuffle rewards inside each group, so that nothing can be learned."""

    def __post_init__(self) -> None:
        for key in ("threads_per_cell", "max_concurrent_harnesses", "keep_checkpoints"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("start_timeout_s", "operation_timeout_s", "compute_timeout_s", "collective_timeout_s", "heartbeat_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be above 0")
        if self.give_up_after < 0:
            raise ValueError("give_up_after must not be negative")


class TasksConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where tasks come from: two folders of task folders, a family that is generated, or Python of your own."""

    train: LocalPath = LocalPath("")
    """Folder of the tasks to train on."""
    held_out: LocalPath = LocalPath("")
    """Folder of the tasks that only evaluations run."""
    family: Literal["", "mini-repositories"] = ""
    """A deterministic family that is written into the cache instead; the seed of the run chooses its members."""
    source: str = ""
    """`module:name` of an iterator that says which task each rollout group runs, by what came of those before (docs/hooks.md)."""
    num_train: int = 96
    """Tasks of the family to train on."""
    num_held_out: int = 24
    """Tasks of the family to evaluate on; they share no test with those to train on."""

    def __post_init__(self) -> None:
        if (self.family and self.train) or not (self.family or self.train or self.source):
            raise ValueError("train: give either a folder of tasks (train, held_out) or a family, or a source of your own")
        for key in ("num_train", "num_held_out"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that is trained."""

    model: ModelPlace = ModelPlace("")
    """Folder of a Hugging Face model and its tokenizer, or its name on the hub: `Qwen/Qwen3-0.6B`, `Qwen/Qwen3-0.6B@REVISION`. Empty: `qwengyre warmup` makes a tiny one, once, in the cache, which works
    with the tools of `qwengyre_harness` and the tasks of the quickstart only."""
    temperature: float = 1.0
    """What training samples at, whatever the harness asks for."""
    max_tokens_per_call: int = 1024
    """Most tokens of one answer."""
    max_context_tokens: int = 32768
    """Longest prompt and answer together; the engine's own limit caps it."""
    cache: LocalPath = LocalPath(".cache/qwengyre")
    """Folder for warmed-up models and generated tasks."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError("temperature must be above 0: greedy tokens cannot be trained")
        for key in ("max_tokens_per_call", "max_context_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Evaluations on the held-out tasks. Dispatched at publishes, never trained."""

    samples: int = 4
    """Executions of every held-out task at the training temperature."""
    greedy: bool = True
    """One more execution of every held-out task at temperature 0."""
    every_steps: int = 0
    """Evaluate at the first publish after every n steps; 0: not in between."""
    at_start: bool = True
    """Evaluate the first version."""
    at_end: bool = True
    """Evaluate the last version."""

    @property
    def is_wanted(self) -> bool:
        """Whether there is any evaluation at all."""
        return self.at_start or self.at_end or self.every_steps > 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("samples must be at least 1")
        if self.every_steps < 0:
            raise ValueError("every_steps must not be negative")
