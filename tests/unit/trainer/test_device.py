"""A whole step on a device whose tensors the host cannot read: load, forward, backward, sum, update, expose, pull, offload, restore.

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
from qwengyre.models.placement import HOST, device_of
from qwengyre.trainer.config import TrainerConfig
from tests.unit.trainer.device_steps import CASES

BF16_BOUND = 0.05
"""Kernels that round to 8 bits in other places: 2**-9 a rounding, some 30 roundings one after the other in each of two layers, which add
up like their root: 2**-9 * sqrt(60) = 0.015, three times that."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    command = [sys.executable, "-m", "tests.unit.trainer.device_steps", str(tmp_path_factory.mktemp("models"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_step_leaves_nothing_on_the_host_and_moves_as_the_host_does(case: str, found: dict[str, dict]):
    line, changes = found[case], CASES[case][1]
    assert "error" not in line, line["error"]
    is_narrow = changes.get("dtype") == "bfloat16"
    assert line["sum_gap"] <= (BF16_BOUND if is_narrow else 1e-5)
    if not is_narrow:
        assert line["weight_gap"] <= 2e-4, (
            "Adam's first step is the sign of a gradient: tiny ones move by a share of the rate, 0.01"
        )
    assert (line["pulled"], line["kept"]) == (True, True), "a satellite reads exactly what the core has"
    assert line["devices"] == ["standin"]
    assert line["state_on"] == ("cpu" if "optimizer_device" in changes else "standin")


def test_the_device_refuses_what_a_real_one_does(found: dict[str, dict]):
    assert found["mixing"]["refused"] == ["mixed", "numpy"]
    assert found["mixing"]["with a number"] == [3.0] * 3


def test_a_device_that_is_not_there_is_refused_and_auto_takes_what_there_is():
    assert device_of("cpu") == HOST
    if torch.cuda.is_available():
        assert device_of("auto").type == "cuda"
    else:
        assert device_of("auto") == HOST
        with pytest.raises(ConfigError, match="CUDA"):
            device_of("cuda")


@pytest.mark.parametrize("key", ["expert_parallel", "context_parallel", "tensor_parallel"])
def test_a_way_to_spread_a_model_that_is_not_built_is_refused_with_what_to_do(key: str):
    with pytest.raises(ValueError, match=rf"{key} is not built: leave it at 1"):
        TrainerConfig(**{key: 2})
