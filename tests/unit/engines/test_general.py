"""Any family in the embedded engine: log-probs are those of its own plain forward, whatever was batched, cached, forked or moved."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.engines.api import GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.general.model import GeneralModel
from qwengyre.engines.general.trial import try_model
from qwengyre.engines.model import ModelSpec
from qwengyre.engines.served import read_served
from qwengyre.models.placement import HOST
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.families import tiny_model, write_family

MAX_GAP = 1e-5
"""The system's bound is 1e-4."""
VOCABULARY = 64
MECHANISMS = {
    "dense": ("llama", {}),
    "biased head": ("phi", {}),
    "windows": ("gemma3_text", {}),
    "chunks": ("llama4_text", {}),
    "logits multiplied": ("cohere2", {"logit_scale": 0.5}),
    "soft caps": ("gemma2", {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9}),
    "sinks": ("gpt_oss", {}),
    "sinks and unequal widths": ("mimo_v2_flash", {}),
    "latent attention": ("deepseek_v3", {}),
    "mixture": ("qwen3_moe", {}),
    "gated delta net": ("qwen3_5_text", {}),
    "Kimi's delta attention": ("kimi_linear", {}),
    "short convolutions": ("lfm2", {}),
    "Mamba 2 beside attention": ("falcon_h1", {}),
    "Mamba without attention": ("mamba", {}),
}
STATEFUL = ("gated delta net", "short convolutions", "Mamba 2 beside attention", "Mamba without attention")


class Case:
    """A core, and the plain model of each of its versions."""

    def __init__(self, mechanism: str, **settings: int):
        torch.set_num_threads(1)
        family, changes = MECHANISMS[mechanism]
        own = tiny_model(family, **changes)
        own.set_attn_implementation("eager")
        self.versions = {0: own}
        self.config = EngineConfig(
            **{"max_running": 3, "max_context_tokens": 120, "prefill_chunk": 20, "block_size": 4} | settings
        )
        self.core = self.new_core()
        self.chunks: list[TokenChunk] = []

    def new_core(self) -> EngineCore:
        return EngineCore(GeneralModel(copy.deepcopy(self.versions[0])), self.config, version=0)

    def submit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self.core.submit(request)

    def drain(self) -> None:
        while self.core.has_work():
            self.chunks += self.core.iterate()

    def publish(self, version: int) -> None:
        torch.manual_seed(version)
        model = copy.deepcopy(self.versions[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.versions[version] = model
        self.core.load_weights({name: parameter.detach().numpy() for name, parameter in model.named_parameters()}, version)
        self.chunks += self.core.take_chunks()

    def gap(self, request: GenerateRequest) -> float:
        """Largest difference of a log-prob of this call to that of the plain model of its version."""
        own = [chunk for chunk in self.chunks if chunk.request_id == request.request_id]
        known = np.frombuffer(request.token_ids, np.int32)
        tokens = np.concatenate([known, *(np.array(chunk.token_ids, np.int32) for chunk in own)])
        versions = np.repeat([chunk.version for chunk in own], [len(chunk.token_ids) for chunk in own])
        logprobs = np.concatenate([chunk.logprobs for chunk in own])
        expected = {
            version: plain(self.versions[version], tokens, len(known), request.sampling.temperature) for version in set(versions)
        }
        return max(abs(expected[version][at] - logprobs[at]) for at, version in enumerate(versions))


@torch.inference_mode()
def plain(model: nn.Module, tokens: np.ndarray, num_known: int, temperature: float) -> np.ndarray:
    logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0, num_known - 1 : -1]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, torch.from_numpy(tokens[num_known:].astype(np.int64))[:, None])[:, 0].numpy()


def request(
    name: str, *, shared: int, own: int, max_tokens: int = 15, temperature: float = 1.0, seed: int = 0
) -> GenerateRequest:
    """`shared` tokens that all calls begin with, and some of its own."""
    prompt = [np.random.default_rng(7).integers(0, 60, shared), np.random.default_rng(seed + 99).integers(0, 60, own)]
    return GenerateRequest(name, np.concatenate(prompt).astype(np.int32).tobytes(), Sampling(temperature, max_tokens, (), seed))


def requests(count: int) -> list[GenerateRequest]:
    temperatures = (1.0, 0.6, 0.0, 1.7)
    return [
        request(f"r{index}", shared=25, own=1 + 7 * (index % 4), temperature=temperatures[index % 4], seed=index)
        for index in range(count)
    ]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_logprobs_are_those_of_the_plain_forward_in_any_batch_and_over_publishes(mechanism):
    case, calls = Case(mechanism), requests(7)
    case.submit(calls)
    for version in (1, 2):
        for _ in range(9):
            case.chunks += case.core.iterate()
        case.publish(version)
    case.drain()
    assert {chunk.version for chunk in case.chunks} == {0, 1, 2}
    assert case.core.counts.tokens_recomputed_at_publish > 0
    assert case.core.counts.tokens_cached > 0
    assert max(case.gap(call) for call in calls) <= MAX_GAP


@pytest.mark.parametrize("snapshots", [1, 3, 64])
@pytest.mark.parametrize("mechanism", STATEFUL)
def test_a_state_forks_with_the_prefix_however_few_are_kept(mechanism, snapshots):
    case = Case(mechanism, state_snapshots=snapshots, kv_blocks=40)
    for turn in range(3):
        calls = [msg for msg in requests(6)]
        renamed = [GenerateRequest(f"{turn}/{c.request_id}", c.token_ids, c.sampling) for c in calls]
        case.submit(renamed)
        case.drain()
        assert max(case.gap(call) for call in renamed) <= MAX_GAP
    if snapshots == 64:
        assert case.core.counts.tokens_cached > 0


@pytest.mark.parametrize("mechanism", [*STATEFUL, "dense"])
def test_the_next_turn_goes_on_from_the_end_of_the_last(mechanism):
    case = Case(mechanism)
    first = request("first", shared=30, own=3, max_tokens=9)
    case.submit([first])
    case.drain()
    said = np.concatenate([np.array(chunk.token_ids, np.int32) for chunk in case.chunks])
    longer = first.token_ids + said.tobytes() + np.arange(5, dtype=np.int32).tobytes()
    second = [GenerateRequest(f"second{seed}", longer, Sampling(1.0, 9, (), seed)) for seed in range(2)]
    case.submit(second)
    case.drain()
    assert max(case.gap(call) for call in second) <= MAX_GAP
    assert next(chunk.cached_tokens for chunk in case.chunks if chunk.request_id == "second0") == 33 + 9 - 1


@pytest.mark.parametrize("mechanism", [*STATEFUL, "latent attention"])
def test_a_prefix_moves_to_another_engine_to_the_token(mechanism):
    case = Case(mechanism)
    whole = request("whole", shared=30, own=3, max_tokens=20)
    case.submit([whole])
    while not case.chunks:
        case.chunks += case.core.iterate()
    case.core.abort(["whole"])
    case.chunks += case.core.take_chunks()
    said = np.concatenate([np.array(chunk.token_ids, np.int32) for chunk in case.chunks])
    known = np.concatenate([np.frombuffer(whole.token_ids, np.int32), said])
    num_tokens, regions = case.core.export_regions(known)
    assert num_tokens == len(known) - 1
    case.core = case.new_core()

    def read(into: dict) -> None:
        for name, target in into.items():
            pieces = target if isinstance(target, list) else [target]
            source = regions[name] if isinstance(regions[name], list) else [regions[name]]
            flat = np.concatenate([part.reshape(-1) for part in source])
            at = 0
            for piece in pieces:
                piece.reshape(-1)[:] = flat[at : at + piece.size]
                at += piece.size

    assert case.core.import_blocks(known[:num_tokens], read) == num_tokens
    rest = GenerateRequest("rest", known.tobytes(), Sampling(1.0, 20 - len(said), (), 0, first_index=len(said)))
    case.submit([rest])
    case.drain()
    assert case.core.counts.tokens_prefilled == 0
    assert case.gap(rest) <= MAX_GAP
    alone = Case(mechanism)
    alone.submit([whole])
    alone.drain()
    drawn = [token for chunk in alone.chunks for token in chunk.token_ids]
    assert drawn == said.tolist() + [token for chunk in case.chunks if chunk.request_id == "rest" for token in chunk.token_ids]


def test_which_implementation_serves_a_folder(tmp_path: Path):
    assert isinstance(read_served(write_tiny_qwen3(tmp_path / "plain")), ModelSpec)
    write_family(tmp_path / "qwen3", "qwen3", attention_bias=True)
    write_family(tmp_path / "llama", "llama")
    assert isinstance(read_served(tmp_path / "qwen3"), GeneralModel)
    served = read_served(tmp_path / "llama")
    assert isinstance(served, GeneralModel)
    assert served.fingerprint(16) == read_served(tmp_path / "llama").fingerprint(16) != served.fingerprint(8)
    with pytest.raises(ConfigError, match=r"engine\.kernels"):
        served.open(EngineConfig(kernels="native"), HOST)


def test_a_model_that_serves_otherwise_than_it_computes_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: out + 0.1 * out.cumsum(1))
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM cannot be served: log-probs by blocks are up to"):
        try_model(GeneralModel(model))


@pytest.mark.parametrize(
    "family, reason", [("bloom", "AttentionInterface"), ("minimax", "log-probs by blocks"), ("doge", "mask")]
)
def test_a_family_that_cannot_be_followed_is_refused_by_name(family, reason):
    model = tiny_model(family)
    with pytest.raises(ModelRefused, match=rf"{type(model).__name__} cannot be served: .*{reason}"):
        try_model(GeneralModel(model))


def test_parameters_of_another_model_are_refused():
    case = Case("dense")
    parameters = {name: parameter.detach().numpy() for name, parameter in case.versions[0].named_parameters()}
    del parameters["model.norm.weight"]
    with pytest.raises(ModelRefused, match=r"no parameter 'model\.norm\.weight'"):
        case.core.load_weights(parameters, 1)
