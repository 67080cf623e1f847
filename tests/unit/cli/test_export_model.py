"""`export-model` on run folders as a run leaves them, opened by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.gateway.templates.found import keep_renderer
from qwengyre.models.load import load
from qwengyre.runtime.prepare import keep_policy
from qwengyre.telemetry.folder import RunFolder
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.families import moved_parameters, write_family, write_vision_language
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trainer import checkpoint
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.trainer import Trainer

RENDERER = {"name": "qwen3", "enable_thinking": False}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Steps 0 to 2 as snapshots, 2 and 3 as checkpoints; the weights of a step are those of the start plus the step."""
    model = write_byte_tokenizer(tmp_path / "model")
    write_tiny_qwen3(model, vocab_size=byte_tokenizer().get_vocab_size())
    folder = RunFolder.create(tmp_path / "runs", "a run", f"[engine]\nengine = 'embedded'\n[policy]\nmodel = '{model}'\n")
    keep_policy(model, folder)
    keep_renderer(folder.policy, RENDERER)
    for step in range(4):
        weights = {name: array + step for name, array in load_file(model / "model.safetensors").items()}
        if step < 3:
            checkpoint.write_weights(folder.snapshots / f"v{step:06d}.safetensors", weights)
        if step > 1:
            moments = {"first": weights, "second": weights}
            checkpoint.write(checkpoint.place(folder.checkpoints, step), folder.policy, weights, moments, {"step": step})
    return folder


def export(*arguments: object, code: int = 0) -> str:
    words = ["export-model", *map(str, arguments)]
    result = CliRunner().invoke(application(words), words, env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(("option", "step"), [((), 3), (("--step", 2), 2), (("--step", 1), 1), (("--step", 0), 0)])
def test_a_policy_is_a_folder_that_transformers_opens(run: RunFolder, tmp_path: Path, option: tuple, step: int):
    out = tmp_path / "out" / "policy"
    assert f"wrote the policy after step {step} to {out}" in export(run.path, "--out", out, *option)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "renderer.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "renderer.json").read_text()) == RENDERER
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and model.dtype is torch.float32
    start = load_file(tmp_path / "model" / "model.safetensors")
    for name, weight in model.named_parameters():
        assert np.array_equal(weight.detach(), start[name] + step)
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out).encode("text")) == "text"


@pytest.mark.parametrize("source", ["model", "checkpoint"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next", "deepseek_v3", "vision_language"])
def test_a_snapshot_is_written_as_the_folder_that_the_run_began_with(family: str, source: str, tmp_path: Path):
    """In names and pieces, with what is not trained: a vision tower, corrections of a router, found there or in a checkpoint."""
    model = tmp_path / "model"
    write_vision_language(model) if family == "vision_language" else write_family(model, family)
    folder = RunFolder.create(tmp_path / "runs", "a run", f"[policy]\nmodel = '{model}'\n")
    keep_policy(model, folder)
    moved = moved_parameters(model, seed=1)
    checkpoint.write_weights(folder.snapshots / "v000000.safetensors", moved)
    before = load_file(model / "model.safetensors")
    if source == "checkpoint":
        checkpoint.write(checkpoint.place(folder.checkpoints, 4), folder.policy, before, {"first": {}, "second": {}}, {"step": 4})
        (model / "model.safetensors").rename(tmp_path / "kept.safetensors")
    out = tmp_path / "out"
    export(folder.path, "--out", out, "--step", 0)
    after = load_file(out / "model.safetensors")
    assert {name: array.shape for name, array in after.items()} == {name: array.shape for name, array in before.items()}
    assert all(np.array_equal(after[name], before[name]) for name in before if "visual" in name or "correction" in name)
    opened, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"]
    if source == "checkpoint":
        (tmp_path / "kept.safetensors").rename(model / "model.safetensors")
    expected, ids = load(model, torch.float32), torch.arange(30)[None]
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(torch.from_numpy(moved[name]))
        gap = (opened(ids).logits.log_softmax(-1) - expected(ids).logits.log_softmax(-1)).abs().max()
    assert float(gap) == 0


@pytest.mark.parametrize("step", [0, 1])
def test_adapters_are_merged_into_the_folder_that_the_run_began_with_or_written_alone(tmp_path: Path, step: int):
    """Step 0 is a snapshot, step 1 a checkpoint."""
    model = tmp_path / "model"
    write_family(model, "qwen3_moe")
    trainer = Trainer(model, TrainerConfig(lora=LoraConfig(rank=2)), None)
    trainer.flat.weights.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    folder = RunFolder.create(tmp_path / "runs", "a run", f"[policy]\nmodel = '{model}'\n[trainer.lora]\nrank = 2\n")
    keep_policy(model, folder)
    trainer.save_weights(folder.snapshots / "v000000.safetensors")
    trainer.save_checkpoint(checkpoint.place(folder.checkpoints, 1), 1, folder.policy)
    export(folder.path, "--out", tmp_path / "merged", "--step", step)
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "merged"))
    assert {name: array.shape for name, array in after.items()} == {name: array.shape for name, array in before.items()}
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    probe = trainer.tree_model.probe()
    ids = torch.tensor(probe.token_ids)
    with torch.no_grad():
        found = opened(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    assert np.abs(found.numpy() - np.array(probe.logprobs)).max() < 1e-4
    export(folder.path, "--out", tmp_path / "alone", "--step", step, "--adapter")
    told = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (2, 4, str(model))
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].removeprefix("base_model.model.") for name in alone} == set(told["target_modules"])
    assert not (tmp_path / "alone" / "model.safetensors").exists()


def test_a_run_without_adapters_has_none_to_write(run: RunFolder, tmp_path: Path):
    assert "--adapter: this run trained whole weights" in export(run.path, "--out", tmp_path / "x", "--adapter", code=2)


def test_a_snapshot_whose_names_nobody_knows_is_refused(run: RunFolder, tmp_path: Path):
    (tmp_path / "model" / "model.safetensors").unlink()
    shutil.rmtree(run.checkpoints)
    assert "Put back one of them" in export(run.path, "--out", tmp_path / "x", "--step", 0, code=2)
    assert not (tmp_path / "x").exists()


def test_a_step_that_is_not_there_names_those_that_are(run: RunFolder, tmp_path: Path):
    assert "there is no policy of step 9: this run has 0 to 3" in export(run.path, "--out", tmp_path / "x", "--step", 9, code=2)


@pytest.mark.parametrize("place", ["file", "folder/file"])
def test_what_is_there_is_not_overwritten(run: RunFolder, tmp_path: Path, place: str):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    out = tmp_path / place.split("/")[0]
    assert "--out: this already exists" in export(run.path, "--out", out, code=2)
    assert (tmp_path / place).read_text() == "mine"
    (tmp_path / "empty").mkdir()
    export(run.path, "--out", tmp_path / "empty")


def test_a_run_without_a_policy_says_so(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "new", "")
    assert "has not saved a policy yet" in export(folder.path, "--out", tmp_path / "x", code=2)
    folder.config.write_text("[engine]\nengine = 'paced'\npaced_plan = 'plan.json'\n")
    assert "paced: it has no weights" in export(folder.path, "--out", tmp_path / "x", code=2)


def test_damaged_weights_are_named_and_leave_nothing_behind(run: RunFolder, tmp_path: Path):
    weights = checkpoint.place(run.checkpoints, 3) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert f"{weights}: these weights are damaged" in export(run.path, "--out", tmp_path / "x", code=2)
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x*"))
