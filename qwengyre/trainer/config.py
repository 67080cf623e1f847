"""The `[trainer]` table of a run file."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from qwengyre.trainer.published import PUBLISHED, AggregationName, ObjectiveName


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters (LoRA, arXiv 2106.09685): only they are trained, published and saved."""

    rank: int = 0
    """Width of an adapter; 8 to 64 are usual. 0: no adapters, all weights are trained."""
    alpha: float | None = None
    """An adapter changes a weight by alpha / rank times its product. Unset: twice the rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by their names or what those end with, such as ["q_proj", "v_proj"]. Empty: all but the head."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, is {self.rank}")
        if not self.rank and (self.alpha is not None or self.targets):
            raise ValueError("rank is 0, so that there are no adapters: set it, or leave alpha and targets out")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be a positive number, is {self.alpha}")

    @property
    def scales_by(self) -> float:
        """The alpha that holds."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a cell trains: optimizer, objective, sizes, device."""

    learning_rate: float = 1e-6
    """AdamW step size. The default is the paper's, for models of a billion parameters and more; smaller ones want more: the quickstart
    trains a million parameters with 7e-4."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 1/warmup_steps of it."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only (norm weights and biases are spared)."""
    max_gradient_norm: float = 1.0
    """The gradient is scaled down to this L2 norm, after the division by the number of executions."""
    objective: ObjectiveName = "gspo-capped"
    """Loss of a token, with the clipping, aggregation and advantages that it was published with (table in docs/training.md).

    `gspo-capped` is this project's reading of the paper.
    """
    aggregation: AggregationName | None = None
    """How token losses become one number. Unset: as the objective was published. `two-level`: mean in an execution, then over executions."""
    normalize_advantages: bool | None = None
    """Divide by the standard deviation of the advantages over the whole step. Unset: yes for `reinforce-pp`. Not with a KL term."""
    clip_low: float | None = None
    """Sequence (GSPO) or token (GRPO, DAPO) importance ratios below 1 - clip_low are clipped when A < 0; 1 sets no bound.

    Unset: as the objective was published. The 0.005 of `gspo-capped` is for trajectories of many thousand tokens: widen it for short ones.
    """
    clip_high: float | None = None
    """Ratios above 1 + clip_high are clipped when A > 0. Unset: as the objective was published.

    A clip fraction near 1 means that nothing is learned.
    """
    token_weight_cap: float = 5.0
    """Token importance weights between engine and trainer are truncated here."""
    kl_coefficient: float = 0.0
    """Weight of the KL estimate to the weights that the run started from. Above 0 it needs
    `trajectory.keep_zero_advantage`: executions with advantage 0 train, too."""
    sequence_constant: float = 1024.0
    """Divisor of a trajectory's token sum under `aggregation = "constant"` (Dr. GRPO)."""
    max_row_tokens: int = 262_144
    """Most distinct tokens in one micro-step: larger trees are cut between paths, and contexts must not be longer than this."""
    chunk_tokens: int = 8192
    """Rows longer than this run the two-pass backward in chunks of this many rows: same gradient, less memory."""
    head_logits: int = 1 << 25
    """Logits (tokens x vocabulary) that exist at once."""
    merge_prompt_tokens: int = 32
    """Executions of one micro-step that share at least this many leading tokens compute them once. 0 never merges."""
    ranks: int = 1
    """Processes that a cell trains with; weights, gradients and optimizer state are sharded over them (FSDP2)."""
    expert_parallel: int = 1
    """Not built: only 1 is accepted. Experts are sharded over `ranks` as all layers are."""
    context_parallel: int = 1
    """Not built: only 1 is accepted. A row is computed by one rank; `chunk_tokens` bounds the memory of long ones."""
    tensor_parallel: int = 1
    """Not built: only 1 is accepted. `ranks` shards each layer and gathers it whole where it computes."""
    checkpoint_every: int = 1
    """Optimizer steps between checkpoints."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where a cell trains. `auto`: its first CUDA device, or its processor when it has none. Training on CUDA has not been run."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of weights, activations and their gradients. With `bfloat16` gradients are added up, and the core keeps weights and optimizer
    state, in float32: 2 + 4 bytes a parameter on every cell, 12 more on the core."""
    optimizer_device: Literal["device", "host"] = "device"
    """Where the core keeps the optimizer's state: beside the weights, or in the host's memory, where it also computes updates."""
    lora: LoraConfig = LoraConfig()
    """Adapters in place of whole training. Learning rates are ten times those of whole training or more."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "max_gradient_norm", "token_weight_cap", "sequence_constant")
        for name in positive:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, not {value}")
        for name in ("max_row_tokens", "chunk_tokens", "head_logits", "ranks", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.expert_parallel != 1:
            raise ValueError(
                "expert_parallel is not built: leave it at 1; trainer.ranks shards experts over the devices of a cell"
            )
        if self.context_parallel != 1:
            raise ValueError(
                "context_parallel is not built: leave it at 1, and lower trainer.chunk_tokens for rows that do not fit"
            )
        if self.tensor_parallel != 1:
            raise ValueError(
                "tensor_parallel is not built: leave it at 1; trainer.ranks shards each layer over the devices of a cell"
            )
        for name in ("warmup_steps", "weight_decay", "kl_coefficient", "clip_low", "clip_high", "merge_prompt_tokens"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.dtype == "bfloat16" and self.ranks > 1:
            raise ValueError("dtype: bfloat16 in a cell of several ranks is not built: take float32, or ranks = 1")
        if self.lora.rank and self.ranks > 1:
            raise ValueError("lora: adapters in a cell of several ranks are not built: take ranks = 1, or lora.rank = 0")
        if self.lora.rank and self.dtype == "bfloat16":
            raise ValueError("lora: adapters to weights in bfloat16 are not built: take dtype float32, or lora.rank = 0")
        if self.normalizes_advantages and self.kl_coefficient:
            raise ValueError(
                "normalize_advantages needs kl_coefficient = 0, since it would scale the KL term too: set one of them to false or 0"
            )
        if self.clip_low is not None and self.clip_low > 1:
            raise ValueError(f"clip_low must be at most 1, not {self.clip_low}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Least and greatest importance ratio that is not clipped: (1 - low, 1 + high)."""
        published = PUBLISHED[self.objective]
        low = published.clip_low if self.clip_low is None else self.clip_low
        return 1 - low, 1 + (published.clip_high if self.clip_high is None else self.clip_high)

    @property
    def aggregates(self) -> AggregationName:
        """The aggregation that holds: the one set, or the objective's own."""
        return self.aggregation or PUBLISHED[self.objective].aggregation

    @property
    def normalizes_advantages(self) -> bool:
        """Whether advantages are divided by their standard deviation over the step."""
        if self.normalize_advantages is None:
            return PUBLISHED[self.objective].normalizes_advantages
        return self.normalize_advantages
