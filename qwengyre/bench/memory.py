"""`qwengyre bench memory`: peak memory of long rows and of large vocabularies, above the model and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch
import typer

from qwengyre.bench.measure import measure
from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.norms import replace_norms
from qwengyre.trainer.rows import Targets
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import LayoutPath, build_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MemoryLine(msgspec.Struct, frozen=True):
    case: str
    num_tokens: int
    parameters: int
    cpu_s: float
    peak_mb: float


def memory(
    json_target: JsonTarget = None,
    long_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the long path; 0 leaves it out.")] = 131_072,
    head_tokens: Annotated[int, typer.Option(min=0, help="Tokens under the large vocabulary; 0 leaves it out.")] = 16_384,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Rows of one chunk.")] = 4096,
) -> None:
    """Train one long path, and one path under a vocabulary of 151,936 words; print CPU time and peak memory."""
    torch.set_num_threads(1)
    found = []
    if long_tokens:
        model = _model(vocab_size=1024, hidden_size=256, intermediate_size=1152, num_hidden_layers=1, num_attention_heads=1)
        found.append(_run("one long path, 1 layer", model, long_tokens, chunk_tokens))
    if head_tokens:
        model = _model(vocab_size=151_936, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4)
        found.append(_run("vocabulary of 151,936", model, head_tokens, chunk_tokens))
    write_json(json_target, found)


def _model(**sizes: Any) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    fixed: dict[str, Any] = {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **fixed))
    replace_norms(model)
    return model


def _run(name: str, model: PreTrainedModel, num_tokens: int, chunk_tokens: int) -> MemoryLine:
    tree_model = TreeModel(model, TrainerConfig(chunk_tokens=chunk_tokens))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, num_tokens).astype(np.int32)

    def train() -> None:
        row = build_row([LayoutPath(tokens, (((0, 0, 0), num_tokens),))])
        targets = Targets.of_rows(row, np.arange(1, num_tokens))
        tree_model.train(row, targets, lambda logp: torch.ones_like(logp) / num_tokens)

    measured = measure(train)
    line = MemoryLine(name, num_tokens, sum(p.numel() for p in model.parameters()), measured.cpu_s, measured.peak_mb)
    say(f"{line.case:26} {line.num_tokens:8} tokens {line.parameters / 1e6:6.1f}M {line.cpu_s:8.1f} s {line.peak_mb:7.0f} MB")
    return line
