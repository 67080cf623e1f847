"""The embedded engine's log-probs, and Hugging Face's in float32, against a forward in float64."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from qwengyre.engines.api import GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.core import EngineCore
from qwengyre.engines.model import read_spec, read_weights
from qwengyre.engines.native.build import library
from qwengyre.testing.engines import tiny_parameters, write_tiny_qwen3
from tests.unit.engines.exact import Errors, Qwen3, Row


class HuggingFace:
    """Another's float32 forward, held to the same bound: it vouches for the float64 forward, and the bound for both."""

    def __init__(self, model_dir: Path):
        self.model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(self, row: Row) -> np.ndarray:
        logits = self.model(torch.from_numpy(row.token_T).long()[None]).logits[0, row.num_known - 1 : -1]
        logprobs = torch.log_softmax(logits / (row.temperature or 1.0), -1).numpy()
        return logprobs[np.arange(len(logprobs)), row.token_T[row.num_known :]]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and library() is None:
        return "auto"
    return request.param


def config(kernels: str, **settings: int) -> EngineConfig:
    return EngineConfig(**{"max_running": 4, "max_context_tokens": 300, "prefill_chunk": 50, "kernels": kernels} | settings)


def make_core(model_dir: Path, kernels: str, **settings: int) -> EngineCore:
    core = EngineCore(read_spec(model_dir), config(kernels, **settings), version=0)
    core.load_weights(read_weights(model_dir), 0)
    return core


def make_requests(count: int, temperatures: tuple[float, ...] = (1.0,)) -> list[GenerateRequest]:
    generator = np.random.default_rng(3)
    shared = generator.integers(0, 90, 30)
    requests = []
    for index in range(count):
        prompt = np.concatenate([shared, generator.integers(0, 90, int(generator.integers(1, 140)))]).astype(np.int32)
        sampling = Sampling(temperatures[index % len(temperatures)], int(generator.integers(5, 90)), (), seed=index)
        requests.append(GenerateRequest(f"r{index}", prompt.tobytes(), sampling))
    return requests


def drawn(chunks: list[TokenChunk], request: GenerateRequest) -> tuple[Row, np.ndarray, np.ndarray]:
    """The tokens of a call, and of each that was drawn its log-prob and the version that it was drawn under."""
    own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
    known = np.frombuffer(request.token_ids, np.int32)
    row = np.concatenate([known, *(np.array(chunk.token_ids, np.int32) for chunk in own)])
    versions = np.repeat([chunk.version for chunk in own], [len(chunk.token_ids) for chunk in own])
    return Row(row, len(known), request.sampling.temperature), np.concatenate([chunk.logprobs for chunk in own]), versions


def drain(core: EngineCore, chunks: list[TokenChunk]) -> None:
    while core.has_work():
        chunks += core.iterate()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"rope_theta": 1e6},
        {"vocab_size": 103, "head_dim": 32, "num_key_value_heads": 1},
    ],
)
def test_logprobs_match_a_reference_forward_in_any_batch(tmp_path: Path, kernels: str, changes: dict[str, object]):
    model_dir = write_tiny_qwen3(tmp_path, **changes)
    core, reference = make_core(model_dir, kernels), HuggingFace(model_dir)
    model, errors, errors_of_reference = Qwen3(read_spec(model_dir), read_weights(model_dir)), Errors(), Errors()
    requests, chunks = make_requests(10, (1.0, 0.6, 0.0, 1.7)), []
    for request in requests:
        core.submit(request)
    drain(core, chunks)
    for request in requests:
        row, logprobs, _ = drawn(chunks, request)
        errors.add(model, row, logprobs)
        errors_of_reference.add(model, row, reference.logprobs(row))
    errors_of_reference.assert_no_more_than_rounding()
    errors.assert_no_more_than_rounding()


@pytest.mark.parametrize("fault", ["rope_theta", "rms_eps", "attention scale", "one token of the context"])
def test_an_engine_that_is_a_little_wrong_is_told_from_rounding(tmp_path: Path, kernels: str, fault: str):
    model_dir = write_tiny_qwen3(tmp_path)
    spec, parameters, errors = read_spec(model_dir), read_weights(model_dir), Errors()
    model = Qwen3(spec, parameters)
    if fault == "attention scale":
        name = "model.layers.1.self_attn.q_norm.weight"
        parameters = parameters | {name: parameters[name] * np.float32(1 + 2e-5)}
    wrong = {"rope_theta": spec.rope_theta * (1 + 1e-5), "rms_eps": 2 * spec.rms_eps}
    spec = msgspec.structs.replace(spec, **{name: value for name, value in wrong.items() if name == fault})
    core, chunks = EngineCore(spec, config(kernels), version=0), []
    core.load_weights(parameters, 0)
    for request in make_requests(10):
        core.submit(request)
    drain(core, chunks)
    for request in make_requests(10):
        row, logprobs, _ = drawn(chunks, request)
        if fault == "one token of the context":
            row.token_T[5] = (row.token_T[5] + 1) % spec.vocabulary
        errors.add(model, row, logprobs)
    with pytest.raises(AssertionError):
        errors.assert_no_more_than_rounding()


def test_calls_that_span_publishes_match_under_the_version_of_each_chunk(tmp_path: Path, kernels: str):
    model_dir = write_tiny_qwen3(tmp_path)
    core = make_core(model_dir, kernels)
    versions = {0: read_weights(model_dir)} | {version: tiny_parameters(model_dir, seed=version) for version in (1, 2, 3)}
    requests, chunks = make_requests(7), []
    for request in requests:
        core.submit(request)
    for version in (1, 2, 3):
        for _ in range(17):
            chunks += core.iterate()
        core.load_weights(versions[version], version)
        chunks += core.take_chunks()
    drain(core, chunks)
    assert {chunk.version for chunk in chunks} == {0, 1, 2, 3}
    assert core.counts.tokens_recomputed_at_publish > 0
    models = {version: Qwen3(read_spec(model_dir), parameters) for version, parameters in versions.items()}
    errors = Errors()
    for request in requests:
        row, logprobs, version = drawn(chunks, request)
        for each in set(version.tolist()):
            errors.add(models[each], row, np.where(version == each, logprobs, np.nan))
    errors.assert_no_more_than_rounding()


def test_every_token_of_the_output_is_in_exactly_one_chunk(tmp_path: Path, kernels: str):
    core, chunks = make_core(write_tiny_qwen3(tmp_path), kernels), []
    requests = make_requests(9)
    for request in requests:
        core.submit(request)
    drain(core, chunks)
    assert sum(len(chunk.token_ids) for chunk in chunks) == core.counts.tokens_generated
    assert core.counts.tokens_generated == sum(request.sampling.max_tokens for request in requests)


def test_blocks_that_were_evicted_are_computed_again(tmp_path: Path, kernels: str):
    model_dir = write_tiny_qwen3(tmp_path)
    small, large = make_core(model_dir, kernels, kv_blocks=21), make_core(model_dir, kernels)
    results = []
    for core in (small, large):
        chunks: list[TokenChunk] = []
        for _ in range(2):
            for request in make_requests(8):
                core.submit(request)
            drain(core, chunks)
        results.append([(chunk.request_id, chunk.token_ids) for chunk in chunks])
    assert sorted(results[0]) == sorted(results[1])
    assert small.counts.tokens_cached < large.counts.tokens_cached
