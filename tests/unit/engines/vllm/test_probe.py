"""The forward that vLLM is measured against, against the embedded engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qwengyre.engines.model import read_spec
from qwengyre.engines.vllm.probe import PROBE_TOKENS, reference_logprobs
from qwengyre.testing.engines import tiny_parameters, write_tiny_qwen3


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_is_hugging_faces(tmp_path: Path, tied: bool):
    from transformers import AutoModelForCausalLM

    model_dir = write_tiny_qwen3(tmp_path, tie_word_embeddings=tied)
    parameters = tiny_parameters(model_dir, seed=4)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in parameters.items()}, strict=not tied)
    model.tie_weights()
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([PROBE_TOKENS])).logits[0, :-1].log_softmax(-1)
    expected = logprobs_TV.gather(1, torch.tensor(PROBE_TOKENS[1:])[:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(reference_logprobs(read_spec(model_dir), parameters, PROBE_TOKENS), expected, atol=2e-5)


def test_a_stale_head_shows(tmp_path: Path):
    model_dir = write_tiny_qwen3(tmp_path, tie_word_embeddings=False)
    spec, fresh = read_spec(model_dir), tiny_parameters(model_dir, seed=1)
    stale = fresh | {"lm_head.weight": fresh["lm_head.weight"] + np.float32(1e-3) * np.arange(96, dtype=np.float32)[:, None]}
    gaps = np.subtract(reference_logprobs(spec, fresh, PROBE_TOKENS), reference_logprobs(spec, stale, PROBE_TOKENS))
    assert np.abs(gaps).max() > 1e-3
