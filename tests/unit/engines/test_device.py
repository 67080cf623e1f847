"""Whole calls of the embedded engine on a device whose tensors the host cannot read: loading, passes, prefixes, moves to it and off it.

The device stands in for a real one (`testing/standin_device.py`): it shows where tensors are, not how fast or by which kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qwengyre.core.errors import ConfigError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.testing.engines import write_tiny_qwen3
from tests.unit.engines.device_calls import CASES, MOVED_AFTER, NUM_CALLS, NUM_TOKENS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    module = "tests.unit.engines.device_calls"
    command = [sys.executable, "-m", "qwengyre.testing.standin_device", module, str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_calls_on_the_device_answer_as_on_the_host_and_move_both_ways(case: str, found: dict[str, dict]):
    line = found[case]
    assert "error" not in line, line["error"]
    assert line["same"] == [True] * NUM_CALLS
    assert line["gap"] <= 1e-5
    for way in ("to the device", "to the host"):
        assert line[way] == [NUM_TOKENS] * NUM_CALLS, "a call that moves goes on as if it had stayed"
    assert min(line["spared"]) >= NUM_CALLS * MOVED_AFTER, "what was moved is not computed again"
    assert line["devices"] == ["standin"]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="CUDA") as caught:
        EmbeddedEngine(write_tiny_qwen3(tmp_path), None, EngineConfig(device="cuda"))
    assert "engine.device" in str(caught.value)


@pytest.mark.parametrize("settings", [{"engine": "vllm", "device": "cuda"}, {"device": "cuda", "kernels": "native"}])
def test_what_no_engine_does_on_a_device_is_refused_by_name(settings: dict[str, str]):
    with pytest.raises(ValueError, match=r"device"):
        EngineConfig(**settings)
