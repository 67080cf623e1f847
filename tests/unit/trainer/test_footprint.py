"""What `doctor --fit` says a trainer takes, against what one takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from qwengyre.core.errors import ConfigError
from qwengyre.doctor.fit import ModelSizes, PassSizes, Speeds, fit, measure_model, parts_of, plan_keys
from qwengyre.engines.config import EngineConfig
from qwengyre.sim.workload import Workload
from qwengyre.testing.training import tiny_hybrid, tiny_qwen3, tiny_qwen3_moe
from qwengyre.trainer.config import TrainerConfig

SHARE = 0.1
"""Of what is taken, that the estimate may be away: a library's own buffers are not counted, nor what an allocator keeps."""
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 4, "head_dim": 64}


@pytest.mark.parametrize(("chunk_tokens", "rows"), [(8192, 1024), (512, 1536)])
def test_a_trainer_takes_what_was_foretold_to_a_tenth(tmp_path: Path, chunk_tokens: int, rows: int):
    tiny_qwen3(**LARGE).save_pretrained(tmp_path)
    config = TrainerConfig(chunk_tokens=chunk_tokens, max_row_tokens=rows)
    command = [sys.executable, "-m", "tests.unit.trainer.footprint_real", str(tmp_path), str(chunk_tokens), str(rows)]
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed arrays go back at once: what is resident is what is alive
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], env=mapped, check=False)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    foretold = {
        part.what: part.num_bytes
        for part in parts_of(*measure_model(tmp_path, config), config, EngineConfig())
        if part.role == "core"
    }
    state = foretold["weights"] + foretold["sums of gradients"] + foretold["moments"]
    assert state == real["state"]
    assert state + foretold["a pass at its height"] == pytest.approx(real["state"] + real["pass"], rel=SHARE)
    assert foretold["a pass at its height"] == pytest.approx(real["pass"], rel=2 * SHARE), "and the pass by itself, to a fifth"


@pytest.mark.parametrize("make", [tiny_qwen3_moe, lambda: tiny_hybrid("qwen3.5"), lambda: tiny_hybrid("qwen3-next")])
def test_families_with_experts_and_recurrences_are_foretold_from_their_config(tmp_path: Path, make):
    model = make()
    model.config.save_pretrained(tmp_path)
    sizes, passes = measure_model(tmp_path, TrainerConfig())
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert passes.per_row > 0 and passes.fixed >= 0
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert sizes.met == sizes.parameters - held // 2, "two of four experts"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError):
        measure_model(tmp_path, TrainerConfig())


SIZES = ModelSizes(
    "Model", parameters=4_000_000_000, met=4_000_000_000, largest_layer=100_000_000, outside_layers=400_000_000, kv_numbers=73_728
)
PASSES = PassSizes(fixed=1e9, per_row=1e6, kept_per_row=3e5)
ROOM = 80e9


def verdicts(trainer: TrainerConfig, room: float = ROOM, speeds: Speeds | None = None) -> dict:
    return {
        f.what: f
        for f in fit((SIZES, PASSES), trainer, EngineConfig(engine="vllm", dtype="bfloat16"), (room, speeds or Speeds())).findings
    }


def test_what_does_not_fit_says_what_to_change_and_then_fits():
    config = TrainerConfig(max_row_tokens=65_536)
    core = verdicts(config)["memory, core"]
    assert core.verdict == "missing"
    assert 'optimizer_device = "host"' in core.todo and 'dtype = "bfloat16"' in core.todo
    ranks = int(core.todo.partition("trainer.ranks = ")[2].partition(",")[0])
    assert verdicts(msgspec.structs.replace(config, ranks=ranks))["memory, core"].verdict == "ok"
    assert ranks == 1 or verdicts(msgspec.structs.replace(config, ranks=ranks - 1))["memory, core"].verdict == "missing"
    both = msgspec.structs.replace(config, dtype="bfloat16", optimizer_device="host")
    assert verdicts(both)["memory, core"].verdict == "ok"
    assert verdicts(config, room=7e9)["memory, engine"].todo.startswith("the weights alone do not fit")


def test_moves_and_speeds_are_told_when_bandwidths_are():
    told = verdicts(TrainerConfig(), speeds=Speeds(tflops=1000, utilization=0.5, memory_gb_s=4000, link_gb_s=20))
    assert told["switch to training"].found == "a cell reads 16 GB, 0.80 s at 20 GB/s a rank"
    assert told["training"].found.startswith("20,833 distinct tokens/s"), "1e15 * 0.5 / (6 * 4e9)"
    assert "decoding" in told and verdicts(TrainerConfig())["speed"].verdict == "note"
    assert torch.cuda.is_available() or verdicts(TrainerConfig())["switch to rollout"].todo


def test_what_is_told_of_a_run_is_what_a_plan_takes():
    """With the arithmetic by hand, and by keys that a workload has."""
    trainer, engine = TrainerConfig(dtype="float32", ranks=4), EngineConfig(engine="vllm", max_running=32)
    speeds = Speeds(tflops=100.0, utilization=0.5, link_gb_s=10.0, step_tokens=1e6)
    keys = plan_keys(SIZES, trainer, engine, speeds)
    assert keys.keys() <= set(Workload.__struct_fields__)
    assert (keys["cell_nodes"], keys["slots_per_node"]) == (4, 8.0)
    assert keys["to_rollout_s"] == keys["publish_s"] == pytest.approx(SIZES.parameters * 4 / 10e9)
    assert keys["to_training_s"] == pytest.approx(SIZES.parameters * 4 / 40e9)
    assert keys["train_node_hours_per_step"] == pytest.approx(6e6 * SIZES.met / 50e12 / 3600)
    told = fit((SIZES, PASSES), trainer, engine, (1e12, speeds)).findings[-1]
    assert (told.what, told.verdict) == ("plan", "ok") and "--set cell_nodes=4 --set slots_per_node=8" in told.found
    assert fit((SIZES, PASSES), trainer, engine, (1e12, Speeds())).findings[-1].verdict == "note"
