"""A tree row must give what every path gives by itself: log-probs and gradients, however it is cut into chunks."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.testing.training import (
    every_token,
    flat_gradient,
    paths_alone,
    random_paths,
    tiny_hybrid,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import build_row

WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-10, 1e-9)}


class StayDouble(torch.overrides.TorchFunctionMode):
    """Keeps fp64 where Hugging Face's models cast to fp32 (routers, norms, the gated delta rule).

    In fp32 the rounding of a model is all that a bound could measure, and it differs by processor. In fp64 only a wrong
    tree is larger than the bound.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not args or not isinstance(args[0], torch.Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0]
        if func is torch.nn.functional.softmax:
            kwargs["dtype"] = torch.float64
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    dtypes = (torch.float32, torch.float64)
    return {
        **{("qwen3", dtype): tiny_qwen3(dtype) for dtype in dtypes},
        **{("qwen3 with windows", dtype): tiny_qwen3(dtype, **WINDOW) for dtype in dtypes},
        **{("qwen3-moe", dtype): tiny_qwen3_moe(dtype) for dtype in dtypes},
    }


@pytest.fixture(scope="module")
def hybrids():
    torch.set_num_threads(1)
    return {family: tiny_hybrid(family, torch.float64) for family in ("qwen3-next", "qwen3.5")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 with windows", "qwen3-moe"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 10), num_paths=st.integers(1, 6), chunk=st.sampled_from([3, 8, 999])
)
def test_tree_row_equals_each_path_alone(models, kind, dtype, seed, num_nodes, num_paths, chunk):
    model, rng = models[kind, dtype], np.random.default_rng(seed)
    paths = random_paths(rng, num_nodes, num_paths)
    gap, gradient_gap = gaps(model, paths, chunk, rng)
    max_logp, max_gradient = BOUNDS[dtype]
    assert gap <= max_logp and gradient_gap <= max_gradient


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 8), num_paths=st.integers(1, 5), chunk=st.sampled_from([3, 8, 999])
)
def test_recurrent_state_and_convolution_fork_where_the_tree_does(hybrids, family, seed, num_nodes, num_paths, chunk):
    rng = np.random.default_rng(seed)
    paths = random_paths(rng, num_nodes, num_paths)
    gap, gradient_gap = gaps(hybrids[family], paths, chunk, rng)
    max_logp, max_gradient = BOUNDS[torch.float64]
    assert gap <= max_logp and gradient_gap <= max_gradient


def gaps(model, paths, chunk, rng):
    """Largest difference of a log-prob, and relative L2 difference of the gradient, to every path alone."""
    row = build_row(paths)
    targets, token_row_O = every_token(row)
    coef_O = rng.normal(size=len(token_row_O))
    with StayDouble() if model.dtype == torch.float64 else nullcontext():
        logp_O, gradient = paths_alone(model, paths, row, token_row_O, coef_O)
        tree_model = TreeModel(model, TrainerConfig(chunk_tokens=chunk, head_logits=5 * 61))
        model.zero_grad()
        output = tree_model.train(row, targets, lambda logp: torch.from_numpy(coef_O).to(logp.dtype))
    gap = np.abs(output.logp_O.numpy() - logp_O).max(initial=0)
    return gap, float(torch.linalg.norm(flat_gradient(model) - gradient) / max(torch.linalg.norm(gradient), 1e-3))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_nodes=st.integers(1, 12),
    num_paths=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_squares_hold_every_pair_of_row_and_ancestor_once(seed, num_nodes, num_paths, cuts):
    from qwengyre.trajectory.layout import squares

    paths = random_paths(np.random.default_rng(seed), num_nodes, num_paths, max_node_tokens=6)
    row = build_row(paths)
    expected = np.zeros((row.num_rows, row.num_rows), int)
    for index in range(row.num_rows):
        ancestor = index
        while ancestor >= 0:
            expected[index, ancestor] = 1
            ancestor = row.parent_R[ancestor]
    found = np.zeros_like(expected)
    edges = sorted({0, row.num_rows, *(min(cut, row.num_rows) for cut in cuts)})
    for start, end in pairwise(edges):
        blocks = squares(row, start, end)
        for a, b in blocks.causal:
            found[a:b, a:b] += np.tri(b - a, dtype=int)
        for block in blocks.full:
            found[block.row_start : block.row_end, block.key_start : block.key_end] += 1
    assert np.array_equal(found, expected)
    assert expected.sum() == row.num_pairs


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 12), num_paths=st.integers(1, 8))
def test_rows_of_a_path_spell_the_path_and_follow_parents(seed, num_nodes, num_paths):
    paths = random_paths(np.random.default_rng(seed), num_nodes, num_paths)
    row = build_row(paths)
    assert row.num_rows == len(set(np.concatenate(row.rows_P).tolist()))
    for path, rows_T in zip(paths, row.rows_P, strict=True):
        assert np.array_equal(row.token_ids_R[rows_T], path.token_ids_T)
        assert np.array_equal(row.position_R[rows_T], np.arange(len(rows_T)))
        assert np.array_equal(row.parent_R[rows_T], [-1, *rows_T[:-1]])
    for chain in row.chains:
        ancestors = [index for start, end in chain.runs for index in range(start, end)]
        assert len(ancestors) == row.position_R[chain.start]
        assert not ancestors or row.parent_R[chain.start] == ancestors[-1]
