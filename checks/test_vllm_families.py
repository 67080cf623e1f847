"""vLLM serves any family on this CPU, over one and two devices: what it makes is what the embedded engine makes. `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from qwengyre.core.errors import ModelRefused
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.engines.vllm.engine import VLLMEngine
from qwengyre.testing.families import moved_parameters, published, write_family
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmTransport, cleanup
from qwengyre.transfer.transports import TransportPlace
from tests.contract import test_engines as contract

CONFIG = EngineConfig(
    engine="vllm",
    max_running=4,
    max_context_tokens=contract.MAX_CONTEXT,
    block_size=32,
    kv_blocks=64,
    prefill_chunk=24,
    stream_interval=3,
)
SERVED = {
    "llama": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32},
}
"""By family: sizes that vLLM's kernels on a CPU know."""


@pytest.fixture
def transport() -> Iterator[ShmTransport]:
    torch.set_num_threads(1)
    prefix = f"qg-families-{os.getpid()}"
    transport = ShmTransport(prefix)
    yield transport
    transport.close()
    assert cleanup(prefix) == 0, "an engine left exposed memory behind"


def place(transport: ShmTransport) -> TransportPlace:
    return TransportPlace(TransferConfig(transport="shm"), transport.prefix, "127.0.0.1")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", SERVED)
def test_a_family_is_served_as_it_computes(family: str, ranks: int, tmp_path: Path, transport: ShmTransport):
    """Over a publish, a role switch and a move. Log-probs may differ by twice the bound of the probe, which both stay within."""
    write_family(tmp_path, family, vocab_size=contract.VOCABULARY, **SERVED[family])
    versions = [published(tmp_path, moved_parameters(tmp_path, seed=version)) for version in (1, 2)]

    async def body() -> None:
        config = EngineConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | {"tensor_parallel": ranks})
        engine = VLLMEngine(tmp_path, config, place(transport))
        plain = EngineConfig(max_context_tokens=contract.MAX_CONTEXT, kv_blocks=64)
        embedded = EmbeddedEngine(tmp_path, transport, plain)
        for version, arrays in enumerate(versions, 1):
            snapshot = transport.expose(arrays, version=version, incarnation=1)
            if version == 2:
                await engine.offload()
                await engine.restore(snapshot, version)
            else:
                await engine.update_weights(snapshot, version)
            await embedded.update_weights(snapshot, version)
            transport.release(snapshot)
            asked = contract.request(f"v{version}", prompt=50, max_tokens=60)
            ours, theirs = await contract.collect(engine.generate(asked)), await contract.collect(embedded.generate(asked))
            assert contract.tokens_of(ours) == contract.tokens_of(theirs)
            assert {chunk.version for chunk in ours} == {version}
            gaps = np.subtract(logprobs_of(ours), logprobs_of(theirs))
            assert np.sqrt(np.mean(gaps**2)) <= 1e-5
        handle = await engine.export_kv(asked.token_ids)
        assert handle is not None and len(handle.exposure.others) == ranks - 1
        assert await engine.import_kv(handle) == handle.num_tokens
        await engine.release(handle.handle_id)
        await engine.close()
        await embedded.close()

    asyncio.run(body())


def test_a_model_that_vllm_does_not_serve_is_refused_by_name(tmp_path: Path, transport: ShmTransport):
    write_family(tmp_path, "mamba2")
    with pytest.raises(ModelRefused, match="does not serve this model"):
        VLLMEngine(tmp_path, CONFIG, place(transport))


def logprobs_of(chunks: list) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]
