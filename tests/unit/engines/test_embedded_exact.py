"""The embedded engine's log-probs against a plain Hugging Face forward in float32."""

from __future__ import annotations

from pathlib import Path

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

BOUND = 1e-5


class Audit:
    """Compares recorded log-probs with a reference forward under the weights of each version."""

    def __init__(self, model_dir: Path):
        self.model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def use(self, parameters: dict[str, np.ndarray]) -> None:
        state = {name: torch.from_numpy(array) for name, array in parameters.items()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}

    @torch.inference_mode()
    def gap(self, known: np.ndarray, chunk: TokenChunk, temperature: float) -> float:
        row = np.concatenate([known, np.array(chunk.token_ids, np.int32)]).astype(np.int64)
        logits = self.model(torch.from_numpy(row)[None]).logits[0] / (temperature or 1.0)
        logprobs = torch.log_softmax(logits, -1)[len(known) - 1 : -1]
        reference = logprobs.gather(1, torch.tensor(chunk.token_ids)[:, None])[:, 0]
        return float((reference - torch.tensor(chunk.logprobs)).abs().max())


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and library() is None:
        return "auto"
    return request.param


def make_core(model_dir: Path, kernels: str, **settings: int) -> EngineCore:
    config = EngineConfig(**{"max_running": 4, "max_context_tokens": 300, "prefill_chunk": 50, "kernels": kernels} | settings)
    core = EngineCore(read_spec(model_dir), config, version=0)
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
    core, audit = make_core(model_dir, kernels), Audit(model_dir)
    requests, chunks = make_requests(10, (1.0, 0.6, 0.0, 1.7)), []
    for request in requests:
        core.submit(request)
    drain(core, chunks)
    for request in requests:
        known = np.frombuffer(request.token_ids, np.int32)
        for chunk in (chunk for chunk in chunks if chunk.request_id == request.request_id):
            assert audit.gap(known, chunk, request.sampling.temperature) < BOUND
            known = np.concatenate([known, np.array(chunk.token_ids, np.int32)])


def test_calls_that_span_publishes_match_under_the_version_of_each_chunk(tmp_path: Path, kernels: str):
    model_dir = write_tiny_qwen3(tmp_path)
    core, audit = make_core(model_dir, kernels), Audit(model_dir)
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
    for version, parameters in versions.items():
        audit.use(parameters)
        for request in requests:
            known = np.frombuffer(request.token_ids, np.int32)
            for chunk in (chunk for chunk in chunks if chunk.request_id == request.request_id):
                if chunk.version == version and chunk.token_ids:
                    assert audit.gap(known, chunk, 1.0) < BOUND
                known = np.concatenate([known, np.array(chunk.token_ids, np.int32)])


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
