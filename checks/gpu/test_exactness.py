"""Steps and calls on the device against the processor: float32 to rounding, bfloat16 within the bound of the system."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from checks.gpu.conftest import Note
from qwengyre.models.placement import HOST
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.families import write_family
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport, cleanup
from tests.unit.engines import device_calls
from tests.unit.trainer.device_steps import CASES, CONFIG, MODELS, compare
from tests.unit.trainer.test_device import BF16_BOUND

SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 4096}
"""Wide and deep enough for the gap of bfloat16 to have a distribution."""


@pytest.fixture
def transport() -> Iterator[ShmTransport]:
    prefix = f"qg-gpu-{secrets.token_hex(6)}"
    made = ShmTransport(prefix)
    yield made
    made.close()
    cleanup(prefix)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """TF32 has 10 bits: it would hide what float32 is compared for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_the_device_moves_as_one_on_the_processor(
    case: str, device: torch.device, transport: ShmTransport, tmp_path: Path, note: Note
):
    model, changes = CASES[case]
    MODELS[model]().save_pretrained(tmp_path)
    found = compare(tmp_path, TrainerConfig(**{**CONFIG, **changes}), transport, device)
    note(sum_gap=found["sum_gap"], weight_gap=found["weight_gap"])
    is_narrow = changes.get("dtype") == "bfloat16"
    assert found["sum_gap"] <= (BF16_BOUND if is_narrow else 1e-4)
    assert (found["pulled"], found["kept"], found["devices"]) == (True, True, [device.type])
    assert found["state_on"] == ("cpu" if "optimizer_device" in changes else device.type)


def test_log_probs_in_bfloat16_stay_within_their_rounding_of_float32(
    device: torch.device, transport: ShmTransport, tmp_path: Path, note: Note
):
    write_tiny_qwen3(tmp_path, **SHAPE)
    plain = Trainer(tmp_path, TrainerConfig(), transport, device=HOST).tree_model.probe()
    narrow = Trainer(tmp_path, TrainerConfig(dtype="bfloat16"), transport, device=device).tree_model.probe()
    gaps = np.abs(np.subtract(narrow.logprobs, plain.logprobs))
    shares = {f"p{share}": float(np.percentile(gaps, share)) for share in (50, 90, 99, 100)}
    note(tokens=len(gaps), mean=float(gaps.mean()), bound=plain.bound("bfloat16"), **shares)
    assert not (reason := plain.refusal(narrow.logprobs, "bfloat16")), reason


@pytest.mark.parametrize("family", device_calls.CASES)
def test_calls_on_the_device_answer_as_on_the_processor_and_move_both_ways(
    family: str, device: torch.device, tmp_path: Path, note: Note
):
    folder = tmp_path / family
    write_tiny_qwen3(folder) if family == "qwen3" else write_family(folder, family)
    found = device_calls.compare(folder, device)
    note(gap=found["gap"])
    assert found["same"] == [True] * device_calls.NUM_CALLS and found["gap"] <= 1e-4
    for way in ("to the device", "to the host"):
        assert found[way] == [device_calls.NUM_TOKENS] * device_calls.NUM_CALLS
    assert min(found["spared"]) >= device_calls.NUM_CALLS * device_calls.MOVED_AFTER
    assert found["devices"] == [device.type]
