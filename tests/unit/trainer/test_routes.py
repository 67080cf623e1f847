"""Mixtures of experts: what the engine chose, the trainer takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qwengyre.core.errors import TrainerError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.general.model import GeneralModel
from qwengyre.models.plan import following
from qwengyre.testing.families import tiny_model
from qwengyre.testing.training import micro_step, random_execution
from qwengyre.trainer import rows, trial
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import NO_ROUTE, LayoutPath, TreeRow, build_row
from tests.contract import test_engines as contract

MIXTURES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
ROUTERS = (".gate.weight", "router.weight")


@torch.no_grad()
def mixture(family: str, **changes: int) -> nn.Module:
    """Tiny, with experts that differ and routers that tell tokens apart."""
    model = tiny_model(family, **changes)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(ROUTERS):
            parameter.normal_(0, 0.5)
        elif parameter.ndim == 3:
            parameter.normal_(0, 0.15)
    return model


class Routing(NamedTuple):
    logits_TV: Tensor
    routes_TB: np.ndarray


class Chosen:
    """A plan that notes what routers choose, and in place of it says what `given` says."""

    def __init__(self, given_TB: np.ndarray | None = None):
        self.noted: list[np.ndarray] = []
        self._given, self._at = given_TB, 0

    def choose(self, chosen_nK: Tensor) -> Tensor:
        if self._given is not None:
            first, self._at = self._at, self._at + chosen_nK.shape[1]
            chosen_nK = torch.from_numpy(self._given[:, first : self._at].astype(np.int64))
        self.noted.append(chosen_nK.numpy().astype(np.uint8))
        return chosen_nK


def plainly(model: nn.Module, ids_T: np.ndarray, given_TB: np.ndarray | None = None) -> Routing:
    """By the model's own forward."""
    plan, before = Chosen(given_TB), model.config._attn_implementation
    model.set_attn_implementation("eager")
    with following(plan), torch.no_grad():
        logits_TV = model(input_ids=torch.from_numpy(ids_T.astype(np.int64))[None], use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return Routing(logits_TV.float(), np.concatenate(plan.noted, 1))


def logprobs(logits_TV: Tensor, ids_T: np.ndarray) -> np.ndarray:
    """Of tokens 1 and on."""
    return logits_TV[:-1].log_softmax(-1).numpy()[np.arange(len(ids_T) - 1), ids_T[1:]]


def one_path(ids_T: np.ndarray, routes_TB: np.ndarray | None) -> TreeRow:
    row = build_row([LayoutPath(ids_T.astype(np.int32), (((0, 0, 0), len(ids_T)),))])
    return TreeRow(*(getattr(row, name) for name in row.__struct_fields__[:-1]), routes_TB)


def of_tree(model: TreeModel, ids_T: np.ndarray, routes_TB: np.ndarray | None) -> np.ndarray:
    row = one_path(ids_T, routes_TB)
    return model.logprobs(row, trial.every_token(row)[0]).logp_O.numpy()


@pytest.mark.parametrize("family", [*MIXTURES, "afmoe", "ernie4_5_moe", "glm4_moe"])
def test_routers_of_tiny_models_tell_tokens_apart(family: str):
    """Some families begin them, or their corrections, at zero: all tokens would go to the same experts, and a test of routes show nothing."""
    model = tiny_model(family)
    assert all(tensor.any() for tensor in model.state_dict().values() if tensor.is_floating_point())
    TreeModel(model, TrainerConfig())
    assert len(np.unique(np.sort(plainly(model, np.arange(40)).routes_TB), axis=0)) > 1


@pytest.mark.parametrize("family", MIXTURES)
def test_an_engine_tells_the_experts_of_every_token_that_it_computes(family: str):
    served = GeneralModel(mixture(family))
    core = EngineCore(
        served, EngineConfig(max_running=2, max_context_tokens=64, kv_blocks=16, block_size=8, prefill_chunk=7), version=0
    )
    for call in (contract.request("a", prompt=20, max_tokens=9), contract.request("b", prompt=11, max_tokens=13)):
        core.submit(
            contract.GenerateRequest(
                call.request_id, (np.frombuffer(call.token_ids, np.int32) % 60).astype(np.int32).tobytes(), call.sampling
            )
        )
    chunks = []
    while core.has_work():
        chunks += core.iterate()
    for name, num_prompt in (("a", 20), ("b", 11)):
        own = [chunk for chunk in chunks if chunk.request_id == contract.named(name)]
        prompt = (np.random.default_rng(num_prompt).integers(0, contract.VOCABULARY, num_prompt) % 60).astype(np.int32)
        ids_T = np.concatenate([prompt, np.array(contract.tokens_of(own), np.int32)])
        expected_TB = plainly(served.model, ids_T[:-1]).routes_TB
        assert [chunk.first_routed for chunk in own] == np.cumsum([0, *(chunk.num_routed for chunk in own)])[:-1].tolist()
        found_TB = np.frombuffer(b"".join(chunk.routes for chunk in own), np.uint8).reshape(-1, expected_TB.shape[1])
        np.testing.assert_array_equal(np.sort(found_TB), np.sort(expected_TB), "all but the last token, which nobody computed")


@pytest.mark.parametrize("chunk_tokens", [64, 7])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_tree_goes_where_it_is_told_and_its_gradient_reaches_the_router(family: str, chunk_tokens: int):
    """Told of experts that no router would choose; of some tokens nothing is told."""
    model = mixture(family)
    tree_model = TreeModel(model, TrainerConfig(chunk_tokens=chunk_tokens))
    ids_T = np.random.default_rng(0).integers(0, 60, 20)
    own_TB = plainly(model, ids_T).routes_TB
    told_TB = (own_TB + 1) % 4
    expected = logprobs(plainly(model, ids_T, told_TB).logits_TV, ids_T)
    assert np.abs(expected - logprobs(plainly(model, ids_T).logits_TV, ids_T)).max() > 0.05
    np.testing.assert_allclose(of_tree(tree_model, ids_T, told_TB), expected, atol=2e-5)
    half_TB = told_TB.copy()
    half_TB[10:] = NO_ROUTE
    found = of_tree(tree_model, ids_T, half_TB)
    np.testing.assert_allclose(found[:9], expected[:9], atol=2e-5)
    row = one_path(ids_T, told_TB)
    model.zero_grad()
    tree_model.train(row, trial.every_token(row)[0], torch.ones_like)
    routers = [parameter.grad for name, parameter in model.named_parameters() if name.endswith(ROUTERS)]
    assert routers and all(grad is not None and float(grad.abs().max()) > 0 for grad in routers)


def test_routes_lie_in_the_row_where_their_tokens_do_and_those_of_another_model_are_refused():
    execution = random_execution(np.random.default_rng(0), 0, advantage=1.0, vocabulary=60)
    trajectories = tuple(
        type(t)(t.role, t.segments, t.token_ids_T, t.trainable_T, t.logprob_T, t.version_T, bytes([at, at] * t.num_tokens))
        for at, t in enumerate(execution.trajectories)
    )
    told = micro_step(
        "m",
        0,
        type(execution)(**{n: getattr(execution, n) for n in execution.__struct_fields__} | {"trajectories": trajectories}),
    )
    row = rows.build(told, TrainerConfig()).row
    assert row.routes_RB.shape == (row.num_rows, 2)
    for at, rows_T in enumerate(row.rows_P):
        assert (row.routes_RB[rows_T, 0] <= at).all() and row.routes_RB[rows_T[-1], 0] == at
    tree_model = TreeModel(mixture("qwen3_moe"), TrainerConfig())
    with pytest.raises(TrainerError, match="of another model"):
        tree_model.logprobs(row, trial.every_token(row)[0])
