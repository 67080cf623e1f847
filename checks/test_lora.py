"""Adapters in the real program, killed and gone on with, and in the real PEFT (`pip install -e '.[peft]'`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.records import StepFinished
from qwengyre.testing.families import write_family
from qwengyre.trainer import checkpoint
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.trainer import Trainer
from tests.integration.run_kit import RunKit, executions_done, kill, metrics, summary

LORA = ("--set", "trainer.lora.rank=4", "--set", "trainer.learning_rate=1e-2", "--set", "evaluation.at_end=false")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5_text", "deepseek_v3", "nemotron_h"])
def test_peft_opens_a_checkpoint_and_computes_what_was_trained(family: str, tmp_path: Path):
    torch.set_num_threads(1)
    write_family(tmp_path / "policy", family)
    trainer = Trainer(tmp_path / "policy", TrainerConfig(lora=LoraConfig(rank=3, alpha=5.0)), None)
    trainer.flat.weights.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    trainer.save_checkpoint(tmp_path / "c" / "step-000001", 1, tmp_path / "policy")
    probe = trainer.tree_model.probe()
    ids = torch.tensor(probe.token_ids)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager")
    opened = PeftModel.from_pretrained(base, str(tmp_path / "c" / "step-000001")).eval()
    trained = {name for name, _ in opened.named_parameters() if ".lora_" in name}
    assert len(trained) == len(trainer.flat.spans)
    with torch.no_grad():
        for model in (opened, opened.merge_and_unload()):
            found = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            assert np.abs(found.numpy() - np.array(probe.logprobs)).max() < 1e-4


def exported(folder: RunFolder, out: Path, *more: str) -> Path:
    words = ["export-model", str(folder.path), "--out", str(out), *more]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 0, result.output
    return out


def test_a_run_trains_adapters_alone_is_killed_goes_on_and_its_policy_is_evaluated(tmp_path: Path):
    kit = RunKit(tmp_path, steps=2)
    process = kit.start(*LORA)
    kit.wait_until(lambda: kit.has_begun() and bool(metrics(kit.run_folder(), StepFinished)), process)
    kill(process.pid)
    process.wait()
    folder = kit.run_folder()
    before = executions_done(folder)
    resumed = kit.start("--resume", str(folder.path))
    assert resumed.wait() == 0, kit.output()
    assert executions_done(folder).keys() >= before.keys()
    found = summary(folder)
    assert found.steps == 2 and found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
    last = checkpoint.place(folder.checkpoints, 2)
    held = load_file(last / "adapter_model.safetensors")
    assert all(".lora_" in name for name in held) and not (last / "model.safetensors").exists()
    assert any(array.any() for name, array in held.items() if ".lora_B" in name)
    for path in folder.snapshot_files().values():
        assert all(name.endswith((".lora_A", ".lora_B")) for name in load_file(path))
    merged = exported(folder, tmp_path / "merged")
    alone = exported(folder, tmp_path / "alone", "--adapter")
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    ids = torch.arange(40)[None] + 60
    with torch.no_grad():
        by_peft, by_merging = (
            model(input_ids=ids).logits.log_softmax(-1)
            for model in (PeftModel.from_pretrained(base, str(alone)), AutoModelForCausalLM.from_pretrained(merged))
        )
    assert float((by_peft - by_merging).abs().max()) < 1e-4
    program = [sys.executable, "-c", "from qwengyre.cli.main import main; main()", "evaluate", str(kit.run_file)]
    to_evaluate = [
        *program,
        "--runs-dir",
        str(tmp_path / "evaluations"),
        "--json",
        "-",
        "--set",
        "evaluation.samples=1",
        "--model",
    ]
    done = subprocess.run([*to_evaluate, str(merged)], capture_output=True, text=True)
    assert done.returncode == 0 and 0 < json.loads(done.stdout)["score"] < 1, done.stderr
    refused = subprocess.run([*to_evaluate, str(last)], capture_output=True, text=True)
    assert refused.returncode and "has adapters and not the model" in refused.stdout + refused.stderr
