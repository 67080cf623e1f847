"""Batching, the first model and what is measured of it."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch

from qwengyre.engines.general.model import GeneralModel
from qwengyre.engines.general.trial import try_model
from qwengyre.sandbox.families.mini_repositories import OPERATORS
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.rows import Row
from qwengyre.warmup.skill import operator_entropy, share_known
from qwengyre.warmup.tokenizer import learn_tokenizer
from qwengyre.warmup.training import batch_stream, batches, fit, new_model, score_tokens

CONFIG = WarmupConfig(hidden_size=32, num_heads=2, num_kv_heads=1, learning_rate=1e-2, max_updates=25, settle_updates=5)

EVEN = torch.ones(len(learn_tokenizer([])))


def row(*token_ids: int, learned_from: int = 0) -> Row:
    return Row(np.array(token_ids, np.int32), np.arange(len(token_ids)) >= learned_from)


@pytest.fixture
def model():
    return new_model(CONFIG, learn_tokenizer([]), seed=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_every_family_that_a_warm_up_makes_is_trained_and_served_as_it_computes(family):
    made = [new_model(msgspec.structs.replace(CONFIG, family=family), learn_tokenizer([]), seed=0) for _ in range(2)]
    sizes = made[0].config
    assert (sizes.model_type, sizes.num_hidden_layers, sizes.hidden_size) == (family, CONFIG.num_layers, CONFIG.hidden_size)
    TreeModel(made[0], TrainerConfig())
    try_model(GeneralModel(made[1]))


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


def losses_of(batch: list[Row], weight_V: torch.Tensor = EVEN, num_updates: int = 1) -> list[float]:
    losses: list[float] = []

    def enough(done: int, loss: float) -> bool:
        losses.append(loss)
        return done == num_updates

    fit(new_model(CONFIG, learn_tokenizer([]), 0), itertools.repeat(batch), weight_V, CONFIG, enough)
    return losses


def never(done: int, loss: float) -> bool:
    return False


def test_fitting_lowers_the_loss_and_learns_only_what_is_to_be_learned(model):
    batch = [row(5, 6, 7, 8, learned_from=2)] * 4
    losses = losses_of(batch, num_updates=20)
    assert losses[-1] < 0.1 * losses[0] and len(losses) == 20
    fit(model, itertools.repeat(batch), EVEN, CONFIG, never)
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    assert logits[1].argmax() == 7 and logits[2].argmax() == 8
    assert logits[0].softmax(-1)[6] < 0.5, "a context token was learned"


def test_it_ends_when_ready_or_out_of_updates_and_settles_either_way(model):
    batch = itertools.repeat([row(5, 6, 7)])
    assert fit(model, batch, EVEN, CONFIG, lambda done, loss: done == 3) == 3 + CONFIG.settle_updates
    assert fit(model, batch, EVEN, CONFIG, never) == CONFIG.max_updates + CONFIG.settle_updates


def test_a_stream_of_batches_brings_every_row_again_and_again():
    rows = [row(*range(length)) for length in range(3, 13)]
    seen = itertools.chain.from_iterable(itertools.islice(batch_stream(rows, 1000, np.random.default_rng(0)), 3))
    assert sorted(map(len, seen)) == sorted(3 * list(range(3, 13)))


def test_padding_changes_nothing():
    short, long = row(5, 6, 7), row(5, 6, 7, 8, 9, 10)
    expected = (2 * losses_of([short])[0] + 5 * losses_of([long])[0]) / 7
    assert losses_of([short, long])[0] == pytest.approx(expected, rel=1e-4)


def test_a_weighted_token_counts_that_much_more_in_the_loss(model):
    weight_V = EVEN.clone()
    weight_V[7] = 3.0
    logits = model(input_ids=torch.tensor([[5, 6]])).logits[0].detach().log_softmax(-1)
    six, seven = -float(logits[0, 6]), -float(logits[1, 7])
    assert losses_of([row(5, 6, 7)])[0] == pytest.approx((six + seven) / 2, rel=1e-5)
    assert losses_of([row(5, 6, 7)], weight_V)[0] == pytest.approx((six + 3 * seven) / 4, rel=1e-5)


def test_only_the_scored_tokens_count(model):
    rows = [row(5, 6, 7, 8, learned_from=2)]
    fit(model, itertools.repeat(rows), EVEN, CONFIG, never)
    is_scored = np.zeros(model.config.vocab_size, bool)
    is_scored[[6, 8]] = True
    share, nats = score_tokens(model, rows, is_scored)
    assert share == 1.0 and 0 < nats < 0.5, "6 is context: only 8 counts"
    is_scored[:] = False
    is_scored[9] = True
    share, nats = score_tokens(model, [row(5, 6, 7, 9, learned_from=2)], is_scored)
    assert share == 0.0 and nats > 1.0


def test_guessing_operators_is_knowing_nothing_and_drawing_as_the_demonstrator_is_knowing_all():
    assert share_known(math.log(len(OPERATORS)), CONFIG) == 0.0
    assert share_known(operator_entropy(CONFIG), CONFIG) == 1.0
    assert share_known(1.1 * math.log(len(OPERATORS)), CONFIG) < 0.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"right_operator": 0.8, "usual_mistake": 0.3}, "right_operator"),
        ({"num_layers": 1}, "num_layers"),
        ({"num_demonstrations": 0}, "num_demonstrations"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict, word: str):
    with pytest.raises(ValueError, match=word):
        WarmupConfig(**wrong)
