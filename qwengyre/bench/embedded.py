"""Tokens per CPU second of the embedded engine, against Hugging Face `generate` on the same calls in the same run."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import typer

from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json

if TYPE_CHECKING:
    from qwengyre.engines.core import EngineCore

QUICKSTART_SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32, "vocab_size": 600}


class EmbeddedFigures(msgspec.Struct, frozen=True):
    """All rates are per CPU second of one thread: what other programs do on the machine does not count."""

    calls: int
    prompt_tokens: int
    output_tokens: int
    kernels: str
    engine_tokens_per_s: float
    engine_prefill_tokens_per_s: float
    iteration_ms: float
    """One token of every call, bookkeeping included."""
    generate_tokens_per_s: float
    ratio: float
    """Engine to `generate`: whole calls, prompts included."""


def embedded(
    calls: Annotated[int, typer.Option(min=1, help="Calls at once.")] = 12,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 300,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens each call generates.")] = 128,
    kernels: Annotated[Literal["auto", "native", "torch"], typer.Option(help="What computes a pass.")] = "auto",
    model: Annotated[Path | None, typer.Option(help="A Qwen3 folder; by default a random one of the quickstart's shape.")] = None,
    json_target: JsonTarget = None,
) -> None:
    """Tokens per CPU second of the embedded engine, against Hugging Face generate on the same calls."""
    from qwengyre.testing.engines import write_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = model or write_tiny_qwen3(Path(scratch), **QUICKSTART_SHAPE)
        figures = compare(model_dir, kernels, np.zeros((calls, prompt_tokens), np.int32), output_tokens)
    write_json(json_target, figures)
    say(f"{calls} calls of {prompt_tokens} + {output_tokens} tokens, {figures.kernels} kernels, per CPU second of one thread")
    say(f"engine    {figures.engine_tokens_per_s:>10,.0f} tokens/s    {figures.iteration_ms:.2f} ms an iteration")
    say(f"prefill   {figures.engine_prefill_tokens_per_s:>10,.0f} tokens/s")
    say(f"generate  {figures.generate_tokens_per_s:>10,.0f} tokens/s    engine / generate = {figures.ratio:.1f}")


def compare(
    model_dir: Path, kernels: Literal["auto", "native", "torch"], shape: np.ndarray, output_tokens: int
) -> EmbeddedFigures:
    """Run the same random prompts, of the shape of `shape`, through both."""
    import torch

    from qwengyre.engines.config import EngineConfig
    from qwengyre.engines.core import EngineCore
    from qwengyre.engines.model import read_spec, read_weights

    torch.set_num_threads(1)
    spec = read_spec(model_dir)
    prompts = np.random.default_rng(0).integers(0, spec.vocabulary, shape.shape).astype(np.int32)
    blocks = 2 * prompts.size // 16 + shape.shape[0] * (output_tokens // 16 + 2) * 2
    config = EngineConfig(
        max_running=len(prompts), max_context_tokens=prompts.shape[1] + output_tokens + 1, kv_blocks=blocks, kernels=kernels
    )
    core = EngineCore(spec, config, version=0)
    core.load_weights(read_weights(model_dir), 0)
    _run_engine(core, prompts[:, ::-1].copy(), 4, "warm")
    prefill_s, decode_s = _run_engine(core, prompts, output_tokens, "run")
    generate_s = _run_generate(model_dir, prompts, output_tokens)
    num_tokens = len(prompts) * output_tokens
    return EmbeddedFigures(
        calls=prompts.shape[0],
        prompt_tokens=prompts.shape[1],
        output_tokens=output_tokens,
        kernels=type(core.forward).__name__.removesuffix("Forward").lower(),
        engine_tokens_per_s=num_tokens / (prefill_s + decode_s),
        engine_prefill_tokens_per_s=prompts.size / prefill_s,
        iteration_ms=1000 * decode_s / (output_tokens - 1),
        generate_tokens_per_s=num_tokens / generate_s,
        ratio=generate_s / (prefill_s + decode_s),
    )


def _run_engine(core: EngineCore, prompts: np.ndarray, output_tokens: int, name: str) -> tuple[float, float]:
    """CPU seconds of the prompts and of the rest."""
    from qwengyre.engines.api import GenerateRequest, Sampling

    for index, prompt in enumerate(prompts):
        core.submit(GenerateRequest(f"{name}{index}", prompt.tobytes(), Sampling(1.0, output_tokens, (), index)))
    began = time.thread_time()
    while core.counts.tokens_prefilled < prompts.size * (1 if name == "warm" else 2):
        core.iterate()
    prefilled = time.thread_time()
    while core.has_work():
        core.iterate()
    return prefilled - began, time.thread_time() - prefilled


def _run_generate(model_dir: Path, prompts: np.ndarray, output_tokens: int) -> float:
    """CPU seconds of `generate` on all prompts in one batch without padding, the best case."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.from_numpy(prompts.astype(np.int64))
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids[:, :32], attention_mask=torch.ones_like(ids[:, :32]), max_new_tokens=2, **settings)
    began = time.thread_time()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, **settings)
    elapsed = time.thread_time() - began
    assert made.shape[1] == prompts.shape[1] + output_tokens
    return elapsed
