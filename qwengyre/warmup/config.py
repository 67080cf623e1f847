"""Configuration of the warm-up (run file table `warmup`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class WarmupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tiny model trained on scripted demonstrations of varying quality, so that a run on CPUs has a policy to start from."""

    family: Literal["qwen3", "qwen3_moe", "qwen3_5_text"] = "qwen3"
    """What is made: dense, a mixture of experts, or a hybrid of gated delta nets and attention (Qwen3.5)."""

    hidden_size: int = 128
    """Width of the model; a multiple of num_heads."""
    num_layers: int = 3
    """Copying from the context takes two layers at least."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; divides num_heads."""
    initializer_range: float = 0.08
    """Standard deviation of the first weights. With Hugging Face's 0.02 so small a model never learns to copy."""
    num_demonstrations: int = 1500
    """Scripted executions to learn from."""
    tokens_per_batch: int = 1500
    """Tokens of one update, padding included."""
    learning_rate: float | None = None
    """Step size of AdamW; falls to a tenth over the last `settle_updates`. By default what the family learns with: 4e-3, 2e-3, 1.5e-3."""
    max_updates: int = 900
    """Most updates at full step size; it ends as soon as the policy copies and knows operators well enough."""
    settle_updates: int = 80
    """Updates over which the step size falls."""
    emphasis: float = 6.0
    """Weight in the loss of names, numbers and operators against the words around them: without it copying comes late."""
    min_copying: float = 0.96
    """Share of names and numbers that the model must copy right: below, reinforcement learning would get nowhere."""
    min_operators: float = 0.5
    """Share of what the demonstrations tell about operators that it must know. This is learned last."""
    num_threads: int = 1
    """CPU threads of torch."""
    right_operator: float = 0.28
    """Share of first tries in which the demonstrator knows what the word of the specification means."""
    usual_mistake: float = 0.52
    """Share in which it takes the word for one certain other operator, so that a greedy policy starts out wrong."""
    repair: float = 0.8
    """Share of files shown as wrong that the demonstrator tries again; otherwise it looks for the next one."""
    early_stop: float = 0.02
    """Chance, after every file, to call the task done."""
    delegate: float = 0.06
    """Chance to hand a file to a sub-agent."""
    ponder: float = 0.2
    """Chance to think aloud before writing a file, for up to a hundred tokens: answers differ in length as real ones do."""
    watch: float = 0.015
    """Chance, after every file, to start the self-test in its watch mode, which does not return: the harness times out."""
    compact: float = 0.08
    """Chance, after every tool result, that the demonstrator's context is full."""

    def __post_init__(self) -> None:
        for name in ("num_demonstrations", "tokens_per_batch", "max_updates", "settle_updates", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ValueError("learning_rate must be more than 0")
        if self.hidden_size % self.num_heads:
            raise ValueError("hidden_size must be a multiple of num_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.right_operator + self.usual_mistake > 1.0:
            raise ValueError("right_operator + usual_mistake must not exceed 1")
        if self.num_layers < 2:
            raise ValueError("num_layers must be at least 2: one layer cannot copy from the context")
