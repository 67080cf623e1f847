"""A checkpoint is opened by other tools as it lies, and by a resumed run with what lies beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qwengyre.core.errors import TrainerError
from qwengyre.engines.model import read_weights
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.testing.training import micro_step, random_execution, tiny_qwen3
from qwengyre.trainer import checkpoint
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer

WEIGHTS = {"w": np.arange(3, dtype=np.float32)}
MOMENTS = {"first": {"w": np.ones(3, np.float32)}, "second": {"w": np.full(3, 2.0, np.float32)}}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model as a hub has it: weights in several formats, an index, a template, a renderer that was kept."""
    torch.set_num_threads(1)
    folder = write_byte_tokenizer(tmp_path / "policy")
    model = tiny_qwen3(tie_word_embeddings=request.param)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "renderer.json").write_text('{"name": "qwen3", "enable_thinking": false}')
    for stale in ("pytorch_model.bin", "model.gguf", "model-00001-of-00002.safetensors", "consolidated.00.pth"):
        (folder / stale).write_bytes(b"weights of the model that the run started from")
    for index in ("pytorch_model.bin.index.json", "model.safetensors.index.json"):
        (folder / index).write_text('{"weight_map": {}}')
    return folder


def trained(policy: Path) -> Trainer:
    """A trainer whose weights are others than those it started with."""
    start = policy.with_name("start")
    start.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(policy / name, start)
    trainer = Trainer(start, TrainerConfig(learning_rate=0.1, clip_low=0.9, clip_high=1e3), None)
    trainer.begin_step(0)
    trainer.compute(micro_step("m", 0, random_execution(np.random.default_rng(0), 0, advantage=1.0)))
    assert trainer.apply(1).applied
    return trainer


def test_transformers_opens_a_checkpoint_as_it_lies(policy: Path, tmp_path: Path):
    trainer = trained(policy)
    folder = tmp_path / "checkpoints" / "step-000001"
    trainer.save_checkpoint(folder, 1, policy)
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert model.dtype is torch.float32, "as it was trained, whatever the model was that the run started from"
    weights = dict(model.named_parameters())
    assert all(np.array_equal(weights[name].detach(), array) for name, array in trainer.whole_weights().items())
    assert torch.isfinite(model(torch.arange(1, 9)[None]).logits).all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("as before")) == "as before" and tokenizer.chat_template == TEMPLATE


def test_an_engine_and_a_trainer_start_from_a_checkpoint(policy: Path, tmp_path: Path):
    trainer = trained(policy)
    folder = tmp_path / "checkpoints" / "step-000001"
    trainer.save_checkpoint(folder, 1, policy)
    served = read_weights(folder)
    assert all(np.array_equal(served[name], array) for name, array in trainer.whole_weights().items())
    assert torch.equal(Trainer(folder, TrainerConfig(), None).flat.weights, trainer.flat.weights)


def test_nothing_but_the_weights_is_safetensors_and_the_optimizer_lies_beside(policy: Path, tmp_path: Path):
    """Whoever opens a model reads every safetensors file of its folder, vLLM for one."""
    trainer = trained(policy)
    folder = tmp_path / "checkpoints" / "step-000001"
    trainer.save_checkpoint(folder, 1, policy)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert names == {
        "chat_template.jinja",
        "checkpoint.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "renderer.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    with safe_open(folder / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(trainer.flat.spans) and file.metadata() == {"format": "pt"}
    [state] = (tmp_path / "checkpoints" / "optimizer").iterdir()
    assert set(load_file(state)) == {f"{moment}.{name}" for moment in ("first", "second") for name in trainer.flat.spans}


def write(folder: Path, step: int, files: Path) -> Path:
    path = checkpoint.place(folder, step)
    checkpoint.write(path, files, {"w": WEIGHTS["w"] + step}, MOMENTS, {"step": step})
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    return tmp_path / "files"


def test_pruning_takes_the_optimizer_states_along(files: Path, tmp_path: Path):
    for step in range(5):
        write(tmp_path / "c", step, files)
    checkpoint.prune(tmp_path / "c", keep=2)
    assert list(checkpoint.checkpoints(tmp_path / "c")) == [3, 4]
    assert [path.name[:11] for path in sorted((tmp_path / "c" / "optimizer").iterdir())] == ["step-000003", "step-000004"]
    weights, moments, meta = checkpoint.read(checkpoint.place(tmp_path / "c", 4))
    assert (weights["w"].tolist(), moments["second"]["w"].tolist(), meta["step"]) == ([4.0, 5.0, 6.0], [2.0] * 3, 4)


@pytest.mark.parametrize("killed_at", ["put_in_place", "copy_model_files"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one(
    killed_at: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "c", 1, files)
    before = checkpoint.read(path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, killed_at, die)
        checkpoint.write(path, files, {"w": WEIGHTS["w"] * 9}, {"first": {}, "second": {}}, {"step": 1})
    after = checkpoint.read(path)
    assert after[2] == before[2] and np.array_equal(after[0]["w"], before[0]["w"]) and after[1].keys() == before[1].keys()
    write(tmp_path / "c", 2, files)
    left = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert left == ["optimizer", "step-000001", "step-000002"], "what the kill left is removed"
    assert len(list((tmp_path / "c" / "optimizer").iterdir())) == 2


def test_a_kill_between_the_two_renames_leaves_the_old_one(files: Path, tmp_path: Path):
    path = write(tmp_path / "c", 1, files)
    path.replace(path.with_name(".step-000001.old"))
    assert checkpoint.read(path)[2]["step"] == 1 and path.is_dir()


def test_a_checkpoint_of_another_format_or_without_its_state_is_refused(files: Path, tmp_path: Path):
    path = write(tmp_path / "c", 1, files)
    [state] = (tmp_path / "c" / "optimizer").iterdir()
    state.write_bytes(state.read_bytes()[:-4])
    with pytest.raises(TrainerError, match="cannot be read"):
        checkpoint.read(path)
    state.unlink()
    with pytest.raises(TrainerError, match=f"put back model.safetensors in it and {state}"):
        checkpoint.read(path)
    (path / "checkpoint.json").write_text('{"format": 1}')
    with pytest.raises(TrainerError, match="checkpoint format 1, this version reads 2"):
        checkpoint.read(path)


def test_a_policy_in_several_files_is_copied_without_its_weights(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.model", "merges.txt", "modeling_own.py", "vocab.json", "qwen.tiktoken"):
        (source / name).write_text(name)
    save_file(WEIGHTS, source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")
    checkpoint.copy_model_files(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "merges.txt",
        "modeling_own.py",
        "qwen.tiktoken",
        "tokenizer.model",
        "vocab.json",
    ]
