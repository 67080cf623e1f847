"""The forward that vLLM is measured against, against one in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwengyre.engines.model import read_spec
from qwengyre.engines.vllm.probe import PROBE_TOKENS, reference_logprobs
from qwengyre.testing.engines import tiny_parameters, write_tiny_qwen3
from tests.unit.engines.exact import Errors, Qwen3, Row


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_is_exact(tmp_path: Path, tied: bool):
    model_dir = write_tiny_qwen3(tmp_path, tie_word_embeddings=tied)
    spec, parameters, errors = read_spec(model_dir), tiny_parameters(model_dir, seed=4), Errors()
    logprobs = reference_logprobs(spec, parameters, PROBE_TOKENS)
    errors.add(Qwen3(spec, parameters), Row(np.array(PROBE_TOKENS), 1, 1.0), np.array(logprobs))
    errors.assert_no_more_than_rounding()


def test_a_stale_head_shows(tmp_path: Path):
    model_dir = write_tiny_qwen3(tmp_path, tie_word_embeddings=False)
    spec, fresh = read_spec(model_dir), tiny_parameters(model_dir, seed=1)
    stale = fresh | {"lm_head.weight": fresh["lm_head.weight"] + np.float32(1e-3) * np.arange(96, dtype=np.float32)[:, None]}
    gaps = np.subtract(reference_logprobs(spec, fresh, PROBE_TOKENS), reference_logprobs(spec, stale, PROBE_TOKENS))
    assert np.abs(gaps).max() > 1e-3
