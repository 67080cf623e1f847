"""The warm-up in its own process: a model folder that others can load, found again by content."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from qwengyre.core.errors import WarmupFailed
from qwengyre.warmup import warm_up
from qwengyre.warmup.config import WarmupConfig

TINY = WarmupConfig(
    hidden_size=32, num_heads=2, num_kv_heads=1, num_demonstrations=60, max_updates=25, settle_updates=5,
    min_copying=0.0, min_operators=-99.0,
)  # fmt: skip

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    cache, said = tmp_path_factory.mktemp("cache"), []
    return cache, warm_up(TINY, cache, seed=0, progress=said.append), said


def test_the_folder_holds_a_qwen3_that_transformers_loads(made):
    _, folder, _ = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    assert "tie_word_embeddings" in json.loads((folder / "config.json").read_text())


def test_it_says_how_far_it_is(made):
    assert [line for line in made[2] if "update" in line]
    assert all(line.startswith("warm-up") for line in made[2])


def test_the_second_time_it_is_found(made):
    cache, folder, _ = made
    changed, said = (folder / "model.safetensors").stat().st_mtime_ns, []
    assert warm_up(TINY, cache, seed=0, progress=said.append) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed
    assert said == [f"warm-up: found in {folder}"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing unfinished stays"


def test_a_policy_that_is_not_ready_is_refused_and_not_cached(tmp_path: Path):
    strict = msgspec.structs.replace(TINY, num_demonstrations=5, min_copying=1.0)
    with pytest.raises(WarmupFailed, match=r"raise warmup\.max_updates"):
        warm_up(strict, tmp_path, seed=0)
    assert list((tmp_path / "policies").iterdir()) == []


def test_importing_it_does_not_import_torch():
    check = "import sys, qwengyre.warmup; sys.exit('torch' in sys.modules or 'openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env=os.environ).returncode == 0
