"""Small models, random trees and micro-steps for tests of the trainer, and the oracle: every path run alone.

`R` rows, `O` targets, `T` tokens of one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qwengyre.core.ids import ExecutionId, GroupId, MicroStepId
from qwengyre.core.records import CONTEXT_VERSION, MicroStep, PathSegment, Role, TrainingExecution, Trajectory
from qwengyre.trainer import trial
from qwengyre.trainer.norms import replace_norms
from qwengyre.trainer.rows import Targets
from qwengyre.trajectory.layout import LayoutPath, TreeRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 61


class InDouble(TorchFunctionMode):
    """Within it what models ask to be computed in float32, whatever they are in (norms, routers, scans), stays in float64.

    Else two ways to add up one thing are as far apart as float32's rounding, and a test in float64 shows no more than one in float32.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


TEMPERATURE = 0.7


def tiny_qwen3(dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A seeded Qwen3 of 2 layers with grouped heads and tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = _in(dtype, Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "tie_word_embeddings": True, **changes})))
    replace_norms(model)
    return model


def tiny_qwen3_moe(dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A seeded Qwen3-MoE of 2 layers: 4 experts, 2 of them per token, untied head."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    model = _in(dtype, Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes})))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    replace_norms(model)
    return model


def tiny_hybrid(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A seeded `qwen3-next` (with experts) or `qwen3.5`: two layers of gated delta net, one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    layers: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    sizes = {**_SIZES, **linear, **layers}
    model: PreTrainedModel
    if family == "qwen3.5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**sizes, **experts}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # decay and step biases start equal: make every head forget differently
                parameter.add_(0.1 * torch.randn_like(parameter))
    if dtype == torch.float64 and family == "qwen3-next":
        model.set_experts_implementation("eager")
    return _in(dtype, model)


def _in(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    return nn.Module.to(model, dtype)  # transformers' own `to` has no type


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
}


def random_paths(
    rng: np.random.Generator, num_nodes: int, num_paths: int, max_node_tokens: int = 9, vocabulary: int = VOCABULARY
) -> list[LayoutPath]:
    """Paths of one random forest: any node may be a leaf, paths may be prefixes of others or equal."""
    parents = [-1, *(int(rng.integers(-1 if rng.random() < 0.15 else 0, i)) for i in range(1, num_nodes))]
    tokens = [rng.integers(0, vocabulary, rng.integers(1, max_node_tokens + 1)).astype(np.int32) for _ in range(num_nodes)]
    paths = []
    for _ in range(num_paths):
        node, nodes = int(rng.integers(0, num_nodes)), []
        while node >= 0:
            nodes.append(node)
            node = parents[node]
        segments = [((0, i, 0), len(tokens[i])) for i in reversed(nodes)]
        cut = int(rng.integers(1, segments[-1][1] + 1))
        segments[-1] = (segments[-1][0], cut)
        token_ids_T = np.concatenate([tokens[key[1]][:n] for key, n in segments])
        paths.append(LayoutPath(token_ids_T, tuple(segments)))
    return paths


def every_token(row: TreeRow) -> tuple[Targets, np.ndarray]:
    """Targets of advantage 1 for every token that has one before it, and the rows of those tokens (O,)."""
    targets, token_row_O = trial.every_token(row)
    ones_O = targets.temperature_O
    origin_J = (("e000000-0", 0),)
    changed = {"advantage_O": ones_O, "weight_O": ones_O, "temperature_O": TEMPERATURE * ones_O, "origin_J": origin_J}
    return msgspec.structs.replace(targets, **changed), token_row_O


def paths_alone(
    model: PreTrainedModel, paths: Sequence[LayoutPath], row: TreeRow, token_row_O: np.ndarray, coef_O: np.ndarray
) -> tuple[np.ndarray, Tensor]:
    """The oracle: log-probs (O,) and the flat gradient of sum(coef * logp), each path by itself by the model's own attention."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    coef_R, logp_R, seen = np.zeros(row.num_rows), np.zeros(row.num_rows), set()
    coef_R[token_row_O] = coef_O
    for path, rows_T in zip(paths, row.rows_P, strict=True):
        if len(rows_T) < 2:
            continue
        token_ids_T = torch.from_numpy(path.token_ids_T.astype(np.int64))[None]
        logits = model(input_ids=token_ids_T, use_cache=False).logits[0, :-1] / TEMPERATURE
        logp_T = torch.log_softmax(logits, -1).gather(1, token_ids_T[0, 1:, None])[:, 0]
        logp_R[rows_T[1:]] = logp_T.detach().numpy()
        weights = torch.tensor([0.0 if row_ in seen else coef_R[row_] for row_ in rows_T[1:].tolist()], dtype=logp_T.dtype)
        seen.update(rows_T[1:].tolist())
        (logp_T * weights).sum().backward()
    return logp_R[token_row_O], flat_gradient(model)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])


def random_execution(
    rng: np.random.Generator,
    index: int,
    *,
    advantage: float,
    prompt: np.ndarray | None = None,
    num_turns: int = 3,
    num_branches: int = 2,
    vocabulary: int = VOCABULARY,
    turn_tokens: int = 8,
) -> TrainingExecution:
    """Turns of sampled and context tokens on one trunk, and branches off it. Log-probs are near uniform ones."""
    prompt = rng.integers(0, vocabulary, 6).astype(np.int32) if prompt is None else prompt
    nodes = [prompt]

    def new_node() -> int:
        nodes.append(rng.integers(0, vocabulary, rng.integers(1, turn_tokens + 1)).astype(np.int32))
        return len(nodes) - 1

    trunk = [0, *(new_node() for _ in range(2 * num_turns))]
    chosen = [trunk]
    for _ in range(num_branches):
        cut = 1 + 2 * int(rng.integers(0, num_turns))
        chosen.append([*trunk[:cut], new_node(), new_node(), new_node()])
    seen: set[int] = set()
    trajectories = []
    for path in chosen:
        sampled_T = np.concatenate([np.full(len(nodes[n]), place % 2 == 1) for place, n in enumerate(path)])
        fresh_T = np.concatenate([np.full(len(nodes[n]), n not in seen) for n in path])
        seen.update(path)
        noise_T = -np.log(vocabulary) + rng.normal(0, 0.02, len(sampled_T))
        trajectories.append(
            Trajectory(
                role=Role.MAIN,
                segments=tuple(PathSegment(n, len(nodes[n])) for n in path),
                token_ids_T=np.concatenate([nodes[n] for n in path]).astype("<i4").tobytes(),
                trainable_T=(sampled_T & fresh_T).tobytes(),
                logprob_T=np.where(sampled_T, noise_T, 0).astype("<f4").tobytes(),
                version_T=np.where(sampled_T, 0, CONTEXT_VERSION).astype("<i4").tobytes(),
            )
        )
    return TrainingExecution(
        execution=ExecutionId(f"e{index:06d}-0"),
        group=GroupId(index),
        advantage=advantage,
        temperature=TEMPERATURE,
        trajectories=tuple(trajectories),
        num_trainable=sum(int(np.frombuffer(t.trainable_T, "?").sum()) for t in trajectories),
    )


def micro_step(name: str, step: int, *executions: TrainingExecution) -> MicroStep:
    return MicroStep(MicroStepId(name), step, tuple(executions), num_distinct_tokens=0)
