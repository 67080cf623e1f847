"""A model is tried at its load: a short tree by the tree and by the model's own forward, each path alone. Never silently wrong.

Compared are the log-probs of all tokens, and the gradient of a few of the last ones by the embeddings of all before them, which
reaches those through nothing but attention and recurrences: an error of theirs shows there however small the weights are. The tree
branches twice and has two roots; it is computed whole and in chunks, as training does both.

`O` targets, `R` rows, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.core.errors import UnsupportedModel
from qwengyre.models.follow import sentence
from qwengyre.models.placement import HOST, put, wide
from qwengyre.models.plan import current
from qwengyre.trainer.rows import Targets
from qwengyre.trainer.tree_plan import TreePlan
from qwengyre.trajectory.layout import LayoutPath, TreeRow, build_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qwengyre.trainer.tree_model import TreeModel

NODES = (4, 3, 1, 2, 3, 3)
"""Tokens of each node."""
PATHS = ((0, 1, 2), (0, 1, 3), (0, 4), (5,))
"""Nodes of each path."""
CHUNK_TOKENS = 6
"""Cuts a node, a fork and a convolution's reach."""
TRIES = 3
"""With other tokens each: an expert that is chosen by a hair may be another one when sums are rounded otherwise."""
LOGPROB_ROUNDINGS, GRADIENT_ROUNDINGS = 64, 4096
"""Differences that rounding may make, in units of eps * sqrt(layers): of log-probs for each nat of the largest logit, and of gradients,
relative. Families that are right stay below 6 and 140 on random weights, those that were wrong began at 4,000 and 2,700,000
(`make test-models`). The unit is fp32's also in fp64: models compute norms and routers in fp32 whatever their dtype.
"""


class PlainPass(NamedTuple):
    """What the model's own forward says of the tree."""

    row: TreeRow
    targets: Targets
    coef_O: Tensor
    logp_O: Tensor
    gradient_RH: Tensor
    """Of sum(coef * logp) by the embedding of each row."""
    largest_logit: float


def compare(tree_model: TreeModel) -> tuple[int, int, int]:
    """How often a pass asks its plan, by kind. Raises UnsupportedModel when tree and plain forward do not agree."""
    reason, calls = "", (0, 0, 0)
    for attempt in range(TRIES):
        expected = plain(tree_model.model, attempt)
        try:
            calls, reason = _differences(tree_model, expected)
        except UnsupportedModel as error:
            raise UnsupportedModel(tree_model.name, error.reason) from error
        except Exception as error:  # whatever a model's own code raises is a reason to refuse it
            raise UnsupportedModel(tree_model.name, f"its forward fails over a tree: {sentence(error)}") from error
        if not reason:
            break
    if reason:
        raise UnsupportedModel(tree_model.name, reason)
    return calls


def plain(model: PreTrainedModel, attempt: int) -> PlainPass:
    """What the model says as transformers has it. Raises UnsupportedModel when it cannot."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        return _plain(model, attempt)
    except Exception as error:  # whatever a model's own code raises is a reason to refuse it
        raise UnsupportedModel(type(model).__name__, f"its own forward fails on a few tokens: {sentence(error)}") from error
    finally:
        model.set_attn_implementation(before)


def _plain(model: PreTrainedModel, attempt: int) -> PlainPass:
    paths, row = tree(_vocabulary(model), attempt)
    targets, token_row_O = every_token(row)
    ends = {int(rows_T[-1]) for rows_T in row.rows_P}
    device = next(model.get_input_embeddings().parameters()).device
    coef_O = torch.tensor(
        [1.0 + 0.1 * at if int(token_row) in ends else 0.0 for at, token_row in enumerate(token_row_O)], device=HOST
    )
    coef_R = torch.zeros(row.num_rows, device=HOST).index_copy_(0, torch.from_numpy(token_row_O), coef_O)
    logp_R, largest = torch.zeros(row.num_rows, dtype=torch.float64, device=HOST), 0.0
    gradient_RH: Tensor | None = None
    for path, rows_T in zip(paths, row.rows_P, strict=True):
        ids_T = put(path.token_ids_T, device, torch.int64)
        with _embedded(model) as leaves:
            logits = model(input_ids=ids_T[None], use_cache=False).logits[0]
            largest = max(largest, float(logits.detach().abs().max()))
            logp_T = torch.log_softmax(logits[:-1].to(wide(logits.dtype)), -1).gather(1, ids_T[1:, None])[:, 0]
            logp_R[rows_T[1:]] = logp_T.detach().to(HOST).double()
            logp_T[-1].mul(float(coef_R[rows_T[-1]])).backward()
        for _, leaf in leaves:
            assert leaf.grad is not None, "its log-probs depend on its embeddings"
            if gradient_RH is None:
                gradient_RH = torch.zeros(row.num_rows, leaf.shape[-1], dtype=leaf.dtype, device=HOST)
            gradient_RH.index_add_(0, torch.from_numpy(rows_T), leaf.grad[0].to(HOST))
    assert gradient_RH is not None, "it embeds tokens"
    return PlainPass(row, targets, coef_O, logp_R[token_row_O], gradient_RH, largest)


def _differences(tree_model: TreeModel, expected: PlainPass) -> tuple[tuple[int, int, int], str]:
    """Calls of a pass, and what is wrong with the model ("": nothing is)."""
    config, calls = tree_model.config, (0, 0, 0)
    eps = max(torch.finfo(expected.gradient_RH.dtype).eps, torch.finfo(torch.float32).eps)
    unit = eps * max(1, tree_model.num_layers) ** 0.5
    bound = LOGPROB_ROUNDINGS * unit * max(1.0, expected.largest_logit)
    try:
        for chunk_tokens in (expected.row.num_rows, CHUNK_TOKENS):
            tree_model.config = msgspec.structs.replace(config, chunk_tokens=chunk_tokens)
            logp_O, gradient_RH = _by_tree(tree_model, expected)
            gap = float((logp_O.double() - expected.logp_O).abs().max())
            if not gap <= bound:
                return (
                    calls,
                    f"over a tree, log-probs are up to {gap:.2g} away from those of its own forward (rounding: {bound:.1g})",
                )
            gap, bound_here = _largest_share(gradient_RH - expected.gradient_RH, expected.gradient_RH), GRADIENT_ROUNDINGS * unit
            if not gap <= bound_here:
                return calls, (
                    f"over a tree, gradients by earlier tokens are up to {gap:.2g} of themselves away from those of its own forward"
                    f" (rounding: {bound_here:.1g})"
                )
            calls = tree_model.last_calls
    finally:
        tree_model.config = config
    return calls, ""


def _by_tree(tree_model: TreeModel, expected: PlainPass) -> tuple[Tensor, Tensor]:
    """Log-probs (O,) and the gradient by each row's embedding (R, H)."""
    with _embedded(tree_model.model) as leaves:
        output = tree_model.train(expected.row, expected.targets, lambda logp_O: expected.coef_O.to(logp_O))
    gradient_RH = torch.zeros_like(expected.gradient_RH)
    for start, leaf in leaves:
        assert leaf.grad is not None, "its log-probs depend on its embeddings"
        gradient_RH[start : start + leaf.shape[1]] += leaf.grad[0].to(HOST)
    return output.logp_O.to(HOST), gradient_RH


@contextmanager
def _embedded(model: PreTrainedModel) -> Iterator[list[tuple[int, Tensor]]]:
    """Within the block nothing but embedded tokens has a gradient: they are listed, with the first row of their pass."""
    leaves: list[tuple[int, Tensor]] = []

    def watch(module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        leaf = embedded.detach().requires_grad_()
        plan = current()
        leaves.append((plan.own.start if isinstance(plan, TreePlan) else 0, leaf))
        return leaf

    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hook = model.get_input_embeddings().register_forward_hook(watch)
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield leaves
    finally:
        hook.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)


def tree(vocabulary: int, attempt: int = 0) -> tuple[list[LayoutPath], TreeRow]:
    """Paths of random tokens, and their row."""
    rng = np.random.default_rng(attempt)
    tokens = [rng.integers(0, vocabulary, num_tokens).astype(np.int32) for num_tokens in NODES]
    paths = [
        LayoutPath(np.concatenate([tokens[node] for node in nodes]), tuple(((0, node, 0), NODES[node]) for node in nodes))
        for nodes in PATHS
    ]
    return paths, build_row(paths)


def every_token(row: TreeRow) -> tuple[Targets, np.ndarray]:
    """Every token that has one before it, at temperature 1; and the rows of those tokens (O,)."""
    token_row_O = np.flatnonzero(row.parent_R >= 0)
    token_row_O = token_row_O[np.argsort(row.parent_R[token_row_O], kind="stable")]
    return Targets.of_rows(row, token_row_O), token_row_O


def _vocabulary(model: PreTrainedModel) -> int:
    weights = [layer.weight for layer in (model.get_output_embeddings(), model.get_input_embeddings()) if layer is not None]
    return min(weight.shape[0] for weight in weights if isinstance(weight, Tensor))


def _largest_share(difference_RH: Tensor, whole_RH: Tensor) -> float:
    """Of any row: how much the difference is of it, or of a thousandth of the largest when that is more."""
    norm_R = torch.linalg.vector_norm(whole_RH, dim=1)
    return float((torch.linalg.vector_norm(difference_RH, dim=1) / norm_R.clamp_min(float(norm_R.max()) / 1000)).max())
