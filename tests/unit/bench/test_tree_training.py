from __future__ import annotations

import numpy as np
import pytest
import torch

from qwengyre.bench.tree_training import Work, bench_model, run_case
from qwengyre.bench.trees import ModelCost, shared_prompt, sharing_most, side_branches
from qwengyre.trajectory.layout import build_row


@pytest.mark.parametrize("case", [sharing_most(3, 128), side_branches(96, 6, 8)], ids=lambda case: case.name)
def test_every_method_computes_the_same(case):
    torch.set_num_threads(1)
    lines = run_case(Work(bench_model(), case, chunk_tokens=64), repeats=1)
    assert {"flattened", "chains", "chains-chunked", "dense"} <= {line.method for line in lines}
    for line in lines:
        assert line.max_logp_gap <= 1e-5 and line.max_grad_gap <= 1e-5, line.method


def test_ideal_counts_distinct_tokens_and_pairs():
    row = build_row(shared_prompt(2, 1024, 1024).paths)
    assert row.num_rows == 3 * 1024
    assert row.num_pairs == 1024 * 1025 // 2 * 3 + 2 * 1024 * 1024
    assert ModelCost(per_token=1.0, per_pair=0.0).ideal(row) == pytest.approx(3 / 4)
    pairs = 2 * (2048 * 2049 / 2)
    assert ModelCost(per_token=0.0, per_pair=1.0).ideal(row) == pytest.approx(row.num_pairs / pairs)


def test_cases_share_what_they_say():
    row = build_row(side_branches(1024, 5, 16).paths)
    assert row.num_rows == 1024 + 5 * 16
    assert np.max(row.position_R) >= 1023
