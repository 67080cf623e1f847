"""Steps on the stand-in device, in a process of their own: `python -m tests.unit.trainer.device_steps FOLDER`, one line of JSON for each."""

from __future__ import annotations

import json
import secrets
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from qwengyre.models.placement import HOST
from qwengyre.testing.families import tiny_model
from qwengyre.testing.standin_device import MixedDevices, standin_device
from qwengyre.testing.training import micro_step, random_execution, tiny_hybrid, tiny_qwen3, tiny_qwen3_moe
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.shm import ShmTransport, cleanup

CONFIG = {"clip_low": 0.999, "clip_high": 1e6, "learning_rate": 0.01, "weight_decay": 0.1}
MODELS = {
    "dense": lambda: tiny_qwen3(),
    "mixture": lambda: tiny_qwen3_moe(),
    "gated delta net": lambda: tiny_hybrid("qwen3.5"),
    "windows and sinks": lambda: tiny_model("gpt_oss"),
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "whole rows": ("dense", {}),
    "chunks, state on the host": ("dense", {"chunk_tokens": 40, "optimizer_device": "host"}),
    "bfloat16": ("dense", {"dtype": "bfloat16"}),
    "experts": ("mixture", {}),
    "recurrent layers in chunks": ("gated delta net", {"chunk_tokens": 40}),
    "windows and sinks": ("windows and sinks", {}),
}


def claims(vocabulary: int) -> list:
    rng = np.random.default_rng(3)
    made = [random_execution(rng, i, advantage=(-1.0) ** i * (1 + i), vocabulary=vocabulary) for i in range(2)]
    return [micro_step(f"m{i}", 0, execution) for i, execution in enumerate(made)]


def step(trainer: Trainer) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """The sums of one step, on the host, and the weights after it."""
    trainer.begin_step(0)
    for claim in claims(min(61, trainer.tree_model.output.weight.shape[0])):
        assert trainer.compute(claim).tokens_trained > 0
    sums = trainer.flat_gradient().to(HOST, copy=True)
    assert trainer.apply(2).applied
    return sums, {name: array.copy() for name, array in trainer.whole_weights().items()}


def compare(folder: Path, config: TrainerConfig, transport: ShmTransport, device: torch.device) -> dict[str, object]:
    """A step on the device against one on the host, and a satellite that reads the weights after it."""
    expected, expected_weights = step(Trainer(folder, config, transport, device=HOST))
    core, satellite = (Trainer(folder, config, transport, device=device) for _ in range(2))
    sums, weights = step(core)
    satellite.pull(core.expose(1))
    pulled = satellite.whole_weights()
    core.offload()
    core.restore()
    tensors = (core.flat.weights, core.flat.gradient, *core.flat.parameters.values(), *core.tree_model.model.buffers())
    return {
        "sum_gap": float(torch.linalg.norm(sums - expected) / torch.linalg.norm(expected)),
        "weight_gap": max(float(np.abs(weights[name] - expected_weights[name]).max()) for name in weights),
        "pulled": all(np.array_equal(pulled[name], weights[name]) for name in weights),
        "kept": torch.equal(core.flat.weights.to(HOST), satellite.flat.weights.to(HOST)),
        "devices": sorted({tensor.device.type for tensor in tensors}),
        "state_on": core.optimizer.first_N.device.type,
    }


def mixing(device: torch.device) -> dict[str, object]:
    """What the device refuses: else it would prove nothing."""
    there, refused = torch.ones(3, device=device), []
    for name, job in (("mixed", lambda: there + torch.ones(3, device=HOST)), ("numpy", there.numpy)):
        try:
            job()
        except (MixedDevices, RuntimeError, TypeError):
            refused.append(name)
    return {"refused": refused, "with a number": (there + torch.tensor(2.0, device=HOST)).to(HOST).tolist()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    prefix = f"qg-test-{secrets.token_hex(6)}"
    transport = ShmTransport(prefix)
    with standin_device() as device:
        print(json.dumps({"case": "mixing", **mixing(device)}), flush=True)
        for name, (model, changes) in CASES.items():
            MODELS[model]().save_pretrained(folder / model)
            try:
                found = compare(folder / model, TrainerConfig(**{**CONFIG, **changes}), transport, device)
            except Exception:  # every case is told, also when one before it fails
                found = {"error": traceback.format_exc()}
            print(json.dumps({"case": name, **found}), flush=True)
    transport.close()
    cleanup(prefix)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
