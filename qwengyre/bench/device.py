"""`qwengyre bench device`: what a device gives, and what share of it training, decoding, role switches and moves take.

Shares are of what this device did here, in the same run: a large matrix product, a copy in its memory, copies over its bus. By the clock,
after the device has finished; a processor is a device too, for trying the bench itself.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import numpy as np
import torch
import typer
from torch import Tensor

from qwengyre.bench.output import say
from qwengyre.bench.role_switch import num_layers, switch_cell
from qwengyre.bench.trees import VOCABULARY, Case, ModelCost, shared_prompt, sharing_most, side_branches
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.models.placement import HOST, device_of, host_array
from qwengyre.trainer.rows import Targets
from qwengyre.trajectory.layout import LayoutPath, TreeRow, build_row

if TYPE_CHECKING:
    from qwengyre.engines.core import EngineCore
    from qwengyre.trainer.tree_model import TreeModel

Size = Literal["small", "full"]
REPEATS: Final = 5
"""Of each thing that is timed; the fastest counts, and the first, which warms up, does not."""
PREFIX: Final = "qwengyre-bench-device"


class Scale(msgspec.Struct, frozen=True):
    """How much is done."""

    product: int
    """Rows and columns of the matrices."""
    copied: int
    """Bytes."""
    hidden: int
    layers: int
    calls: int
    prompt_tokens: int
    output_tokens: int
    switched_mb: float
    switches: int


SCALES: Final[dict[str, Scale]] = {
    "small": Scale(256, 1 << 22, 64, 2, 4, 64, 16, 2.0, 1),
    "full": Scale(8192, 1 << 30, 2048, 16, 64, 1024, 256, 2000.0, 3),
}


class Limits(msgspec.Struct, frozen=True):
    """What the device gave, per second."""

    tflops: dict[str, float]
    """By dtype."""
    memory_gb_s: float
    """Bytes read and written by a copy in its memory."""
    to_device_gb_s: float
    to_host_gb_s: float


class TrainingLine(msgspec.Struct, frozen=True):
    """One case, by trees or by flattened paths."""

    case: str
    method: str
    dtype: str
    distinct_tokens_per_s: float
    forward_share: float
    """Of the peak of a matrix product in this dtype: FLOPs that the row needs over those that the peak would have done meanwhile."""
    step_share: float
    """Forward and backward together."""


class DeviceFigures(msgspec.Struct, frozen=True):
    device: str
    torch: str
    size: str
    limits: Limits
    training: list[TrainingLine]
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    switch_phases_s: dict[str, float]
    switch_gb: float
    """Weights of the cell that switched; each way reads them once."""
    kv_out_share: float | None
    """Rate at which keys and values left, over that of the bus. None on a processor: they lie where others read them."""
    kv_in_share: float | None
    snapshot_out_share: float | None
    """Weights to the host, laid out as they are exposed, over the bus."""
    snapshot_in_share: float | None


def device_bench(
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="What is measured.")] = "auto",
    size: Annotated[Size, typer.Option(help="full: figures for docs/gpu.md; small: seconds, to try the bench.")] = "full",
    json_target: JsonTarget = None,
) -> None:
    """Measure a device and what share of it each part of a cell takes."""
    where, scale = device_of(device, "--device"), SCALES[size]
    if where.type == "cpu":
        torch.set_num_threads(1)
    limits = limits_of(where, scale)
    say(f"products {limits.tflops} TFLOP/s    memory {limits.memory_gb_s:.1f} GB/s")
    say(f"bus to the device {limits.to_device_gb_s:.1f} GB/s    to the host {limits.to_host_gb_s:.1f} GB/s")
    training = [line for case in cases(size) for line in train(case, where, scale, limits)]
    for line in training:
        say(
            f"{line.case:34} {line.method:9} {line.dtype:8} {line.distinct_tokens_per_s:10,.0f} tokens/s"
            f"    forward {line.forward_share:6.1%}    step {line.step_share:6.1%} of the peak"
        )
    with tempfile.TemporaryDirectory() as scratch:
        figures = serve(Path(scratch), where, scale, limits, training, size)
    write_json(json_target, figures)
    say(f"decode {figures.decode_tokens_per_s:,.0f} tokens/s    prefill {figures.prefill_tokens_per_s:,.0f} tokens/s")
    for phase, seconds in figures.switch_phases_s.items():
        rate = "" if "restore_engine" not in phase else f"    {figures.switch_gb / seconds:.2f} GB/s"
        say(f"  {phase:16} {1000 * seconds:8.1f} ms{rate}")
    shares = [figures.kv_out_share, figures.kv_in_share, figures.snapshot_out_share, figures.snapshot_in_share]
    told = ["-" if share is None else f"{share:.2f}" for share in shares]
    say(f"shares of the bus: KV out {told[0]} in {told[1]}    snapshot out {told[2]} in {told[3]}")


def cases(size: str) -> list[Case]:
    """Those of `bench tree-training`, or smaller ones of the same shapes."""
    if size == "small":
        return [sharing_most(3, 256), side_branches(128, 8, 16)]
    return [sharing_most(5, 16384), shared_prompt(8, 2048, 2048), side_branches(4096, 200, 16)]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """By the clock, until the device has finished."""
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def limits_of(device: torch.device, scale: Scale) -> Limits:
    tflops = {}
    for name in ("float32", "bfloat16"):
        left = torch.randn(scale.product, scale.product, device=device).to(getattr(torch, name))
        took = seconds_of(functools.partial(torch.matmul, left, left), device)
        tflops[name] = round(2 * scale.product**3 / took / 1e12, 3)
    there = torch.ones(scale.copied // 4, device=device)
    copied = seconds_of(there.clone, device)
    here = host_array((scale.copied // 4,), np.float32, device)
    pinned = torch.from_numpy(here)
    to_device = seconds_of(lambda: there.copy_(pinned, non_blocking=True), device)
    to_host = seconds_of(lambda: pinned.copy_(there, non_blocking=True), device)
    return Limits(tflops, 2 * scale.copied / copied / 1e9, scale.copied / to_device / 1e9, scale.copied / to_host / 1e9)


def train(case: Case, device: torch.device, scale: Scale, limits: Limits) -> list[TrainingLine]:
    lines = []
    for dtype in ("float32", "bfloat16"):
        model, cost = train_model(device, scale, dtype)
        row = build_row(case.paths)
        whole = [row]
        alone = [build_row([LayoutPath(path.token_ids_T, (((0, 0, 0), len(path.token_ids_T)),))]) for path in case.paths]
        for method, rows in (("trees", whole), ("flattened", alone)):
            lines.append(_line(case.name, method, dtype, model, cost, rows, row.num_rows, limits, device))
    return lines


def train_model(device: torch.device, scale: Scale, dtype: str) -> tuple[TreeModel, ModelCost]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from qwengyre.models.placement import place
    from qwengyre.trainer.config import TrainerConfig
    from qwengyre.trainer.norms import replace_norms
    from qwengyre.trainer.tree_model import TreeModel

    torch.manual_seed(0)
    heads = max(2, scale.hidden // 128)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": scale.hidden,
        "intermediate_size": 3 * scale.hidden,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": min(128, scale.hidden // heads),
        "max_position_embeddings": 262_144,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(getattr(torch, dtype))
    place(model, device)
    replace_norms(model)
    return TreeModel(model, TrainerConfig()), ModelCost.of(model.config)


def _line(
    case: str,
    method: str,
    dtype: str,
    model: TreeModel,
    cost: ModelCost,
    rows: list[TreeRow],
    num_distinct: int,
    limits: Limits,
    device: torch.device,
) -> TrainingLine:
    work = [
        (row, Targets.of_rows(row, np.flatnonzero(row.parent_R >= 0)[np.argsort(row.parent_R[row.parent_R >= 0])]))
        for row in rows
    ]
    flops = sum(cost.per_token * row.num_rows + cost.per_pair * row.num_pairs for row in rows)

    def forward() -> None:
        for row, targets in work:
            model.logprobs(row, targets)

    def step() -> None:
        for row, targets in work:
            model.train(row, targets, _ones)
        model.model.zero_grad(set_to_none=True)

    forward_s, step_s, peak = seconds_of(forward, device), seconds_of(step, device), limits.tflops[dtype] * 1e12
    # forward: 2 of the 6 FLOPs per weight, 4 of the 14 per pair (bench/trees.py)
    in_forward = sum(cost.per_token / 3 * row.num_rows + cost.per_pair * 4 / 14 * row.num_pairs for row in rows)
    return TrainingLine(case, method, dtype, num_distinct / step_s, in_forward / forward_s / peak, flops / step_s / peak)


def _ones(logp_O: Tensor) -> Tensor:
    return torch.ones_like(logp_O)


def serve(
    scratch: Path, device: torch.device, scale: Scale, limits: Limits, training: list[TrainingLine], size: str
) -> DeviceFigures:
    from qwengyre.bench.role_switch import VOCABULARY as SWITCH_VOCABULARY
    from qwengyre.bench.role_switch import WIDE
    from qwengyre.testing.engines import write_tiny_qwen3

    heads = max(2, scale.hidden // 128)
    shape = {"hidden_size": scale.hidden, "intermediate_size": 3 * scale.hidden, "num_hidden_layers": scale.layers}
    shape |= {
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": min(128, scale.hidden // heads),
    }
    model_dir = write_tiny_qwen3(scratch / "served", **shape, vocab_size=VOCABULARY)
    core = _core(model_dir, device, scale)
    prefill_s, decode_s = _calls(core, scale)
    kv_out, kv_in = _moves(core, device, scale, limits)
    del core
    wide = WIDE | {"num_hidden_layers": num_layers(scale.switched_mb), "vocab_size": SWITCH_VOCABULARY}
    switched_dir = write_tiny_qwen3(scratch / "switched", **(wide if size == "full" else shape | {"vocab_size": VOCABULARY}))
    out_share, in_share = _snapshots(switched_dir, device, limits)
    switched = asyncio.run(switch_cell(switched_dir, scratch, "shm", scale.switches, device.type))
    return DeviceFigures(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "processor",
        torch=str(torch.__version__),
        size=size,
        limits=limits,
        training=training,
        decode_tokens_per_s=scale.calls * (scale.output_tokens - 1) / decode_s,
        prefill_tokens_per_s=scale.calls * scale.prompt_tokens / prefill_s,
        switch_phases_s=switched.phases_s,
        switch_gb=switched.weights_mb / 1000,
        kv_out_share=kv_out,
        kv_in_share=kv_in,
        snapshot_out_share=out_share,
        snapshot_in_share=in_share,
    )


def _core(model_dir: Path, device: torch.device, scale: Scale) -> EngineCore:
    from qwengyre.engines.config import EngineConfig
    from qwengyre.engines.core import EngineCore
    from qwengyre.engines.model import read_spec

    tokens = scale.prompt_tokens + scale.output_tokens + 1
    config = EngineConfig(
        max_running=scale.calls, max_context_tokens=tokens, kv_blocks=2 * scale.calls * (tokens // 16 + 2), kernels="torch"
    )
    core = EngineCore(read_spec(model_dir), config, version=0, device=device)
    core.load_folder(model_dir)
    return core


def _prompts(scale: Scale) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (scale.calls, scale.prompt_tokens)).astype(np.int32)


def _calls(core: EngineCore, scale: Scale) -> tuple[float, float]:
    """Seconds of all prompts, and of what follows; every pass ends with tokens on the host, so the device has finished."""
    from qwengyre.engines.api import GenerateRequest, Sampling

    for name, prompts in (("warm", _prompts(scale)[:, ::-1].copy()), ("run", _prompts(scale))):
        before = core.counts.tokens_prefilled
        for index, prompt in enumerate(prompts):
            core.submit(GenerateRequest(f"{name}{index}", prompt.tobytes(), Sampling(1.0, scale.output_tokens, (), index)))
        began = time.perf_counter()
        while core.counts.tokens_prefilled < before + prompts.size:
            core.iterate()
        prefilled = time.perf_counter()
        while core.has_work():
            core.iterate()
        ended = time.perf_counter()
    return prefilled - began, ended - prefilled


def _moves(core: EngineCore, device: torch.device, scale: Scale, limits: Limits) -> tuple[float | None, float | None]:
    """Shares of the bus at which the blocks of one call leave and come."""
    if device == HOST:
        return None, None
    prompt = _prompts(scale)[0]
    _, regions = core.export_regions(prompt)
    num_bytes = sum(piece.nbytes for value in regions.values() for piece in (value if isinstance(value, list) else [value]))
    out_s = seconds_of(lambda: core.export_regions(prompt), device)
    blocks, _ = core.cache.match(prompt)
    landing = core.memory.landing(blocks)
    in_s = seconds_of(lambda: core.memory.landed(blocks, landing), device)
    return num_bytes / out_s / 1e9 / limits.to_host_gb_s, num_bytes / in_s / 1e9 / limits.to_device_gb_s


def _snapshots(model_dir: Path, device: torch.device, limits: Limits) -> tuple[float | None, float | None]:
    """Shares of the bus at which a trainer's weights leave for an exposure and come from one."""
    from qwengyre.models.load import load
    from qwengyre.trainer.flat import FlatParameters

    if device == HOST:
        return None, None
    flat = FlatParameters(load(model_dir, torch.float32), torch.float32, device)
    gigabytes = 4 * flat.num_parameters / 1e9
    out_s, in_s = seconds_of(flat.arrays, device), seconds_of(flat.landed, device)
    return gigabytes / out_s / limits.to_host_gb_s, gigabytes / in_s / limits.to_device_gb_s
