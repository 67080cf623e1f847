"""Batching, the first model and what is measured of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.rows import Row
from qwengyre.warmup.tokenizer import learn_tokenizer
from qwengyre.warmup.training import batches, copy_accuracy, fit, new_model

CONFIG = WarmupConfig(hidden_size=32, num_heads=2, num_kv_heads=1, learning_rate=1e-2)

EVEN = torch.ones(len(learn_tokenizer([])))


def row(*token_ids: int, learned_from: int = 0) -> Row:
    return Row(np.array(token_ids, np.int32), np.arange(len(token_ids)) >= learned_from)


@pytest.fixture
def model():
    return new_model(CONFIG, learn_tokenizer([]), seed=0)


def test_batches_hold_every_row_once_and_keep_to_the_budget():
    rng = np.random.default_rng(0)
    rows = [row(*range(length)) for length in rng.integers(3, 60, size=100)]
    made = batches(rows, 200, rng)
    assert sorted(id(row) for batch in made for row in batch) == sorted(map(id, rows))
    assert all(max(map(len, batch)) * len(batch) <= 200 for batch in made)


def test_a_row_longer_than_the_budget_is_a_batch_of_its_own():
    assert [len(batch) for batch in batches([row(*range(500)), row(1, 2)], 100, np.random.default_rng(0))] == [1, 1]


def test_the_same_seed_gives_the_same_first_weights_and_another_seed_others():
    tokenizer = learn_tokenizer([])
    first, same, other = (new_model(CONFIG, tokenizer, seed).model.embed_tokens.weight for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_fitting_lowers_the_loss_and_learns_only_what_is_to_be_learned(model):
    rows = [row(5, 6, 7, 8, learned_from=2)] * 4
    losses = []
    fit(model, [rows] * 20, EVEN, CONFIG, lambda done, total, loss: losses.append(loss))
    assert losses[-1] < 0.1 * losses[0] and len(losses) == 20
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    assert logits[1].argmax() == 7 and logits[2].argmax() == 8
    assert logits[0].softmax(-1)[6] < 0.5, "a context token was learned"


def test_padding_changes_nothing(model):
    rows = [row(5, 6, 7), row(5, 6, 7, 8, 9, 10)]
    alone, padded = [], []
    fit(new_model(CONFIG, learn_tokenizer([]), 0), [[rows[0]]], EVEN, CONFIG, lambda *report: alone.append(report[2]))
    fit(new_model(CONFIG, learn_tokenizer([]), 0), [rows], EVEN, CONFIG, lambda *report: padded.append(report[2]))
    longer = []
    fit(new_model(CONFIG, learn_tokenizer([]), 0), [[rows[1]]], EVEN, CONFIG, lambda *report: longer.append(report[2]))
    assert padded[0] == pytest.approx((2 * alone[0] + 5 * longer[0]) / 7, rel=1e-4)


def test_a_weighted_token_counts_that_much_more_in_the_loss():
    rows, weight_V, losses = [row(5, 6, 7)], EVEN.clone(), []
    weight_V[7] = 3.0
    for weights in (EVEN, weight_V):
        fit(new_model(CONFIG, learn_tokenizer([]), 0), [rows], weights, CONFIG, lambda *report: losses.append(report[2]))
    logits = new_model(CONFIG, learn_tokenizer([]), 0)(input_ids=torch.tensor([[5, 6]])).logits[0].log_softmax(-1)
    six, seven = -float(logits[0, 6].detach()), -float(logits[1, 7].detach())
    assert losses == pytest.approx([(six + seven) / 2, (six + 3 * seven) / 4], rel=1e-5)


def test_copy_accuracy_counts_copied_tokens_only(model):
    rows = [row(5, 6, 7, 8, learned_from=2)]
    fit(model, [rows] * 30, EVEN, CONFIG, lambda *report: None)
    is_copied = np.zeros(model.config.vocab_size, bool)
    is_copied[[6, 8]] = True
    assert copy_accuracy(model, rows, is_copied) == 1.0
    is_copied[:] = False
    is_copied[9] = True
    assert copy_accuracy(model, [row(5, 6, 7, 9, learned_from=2)], is_copied) == 0.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"right_operator": 0.8, "usual_mistake": 0.3}, "right_operator"),
        ({"num_layers": 1}, "num_layers"),
        ({"num_demonstrations": 0}, "num_demonstrations"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict, word: str):
    with pytest.raises(ValueError, match=word):
        WarmupConfig(**wrong)
