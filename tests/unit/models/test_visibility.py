"""Windows are read off the model's own mask, so that a layer that tells attention nothing of its window has it all the same."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from qwengyre.models.visibility import Visibility


@pytest.mark.parametrize("window", [1, 2, 5, 30, 31, 100])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 31])
def test_a_sliding_window_is_found_at_any_length(window, num_tokens):
    assert Visibility(sliding_window_causal_mask_function(window)).window(num_tokens) == min(window, num_tokens)


def test_all_before_is_a_window_of_any_length():
    assert Visibility().window(17) == 17


@pytest.mark.parametrize("num_tokens", range(2, 40))
def test_chunks_are_no_window_beyond_the_first(num_tokens):
    sees = Visibility(chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)))
    assert sees.window(num_tokens) == (num_tokens if num_tokens <= 4 else None)
    positions = torch.arange(num_tokens)
    expected = (positions[None] <= positions[:, None]) & (positions[None] // 4 == positions[:, None] // 4)
    assert torch.equal(sees.sees(positions, positions), expected)


def test_later_tokens_are_never_seen():
    sees = Visibility(lambda batch, head, query, key: torch.ones_like(query * key, dtype=torch.bool))
    assert torch.equal(sees.sees(torch.arange(5), torch.arange(5)), torch.ones(5, 5).tril().bool())
