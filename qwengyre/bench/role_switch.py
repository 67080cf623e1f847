"""A cell changes its role and changes back: how long each phase takes, against the time to move the bytes."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import typer

from qwengyre.bench.carriers import CarrierName, open_bench_carrier
from qwengyre.bench.output import JsonTarget, say, write_json
from qwengyre.transfer.api import Carrier, Exposure, Region

if TYPE_CHECKING:
    from qwengyre.runtime.cell import CellSpec
    from qwengyre.runtime.cell_client import CellClient

WIDE: Final = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
VOCABULARY: Final = 8192
PREFIX: Final = "qwengyre-bench-switch"
DEADLINE_S: Final = 300.0


class Figures(msgspec.Struct, frozen=True):
    carrier: str
    weights_mb: float
    switches: int
    """There and back counts as one."""
    phases_s: dict[str, float]
    """Medians, in the order of a switch. `join` is the read of the step's snapshot and the taking of the sums."""
    switch_s: float
    """Sum of the phases."""
    bytes_s: float
    """Median time to read the same snapshots, one for the trainer and one for the engine, each as one region into new memory."""
    ratio_to_bytes: float


def role_switch(
    megabytes: Annotated[float, typer.Option(help="Size of the weights.")] = 220.0,
    switches: Annotated[int, typer.Option(help="How often the cell goes to training and back.")] = 5,
    carrier: CarrierName = "shm",
    json_target: JsonTarget = None,
) -> None:
    """Switch a real cell, a process with its own engine and trainer, there and back; time every phase against bare reads."""
    from qwengyre.testing.engines import write_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        shape = WIDE | {"num_hidden_layers": num_layers(megabytes), "vocab_size": VOCABULARY}
        model_dir = write_tiny_qwen3(Path(scratch) / "model", **shape)
        figures = asyncio.run(switch_cell(model_dir, Path(scratch), carrier, switches))
    write_json(json_target, figures)
    say(f"{figures.weights_mb:.0f} MB of weights over {carrier}, {switches} times to training and back")
    for phase, seconds in figures.phases_s.items():
        say(f"  {phase:16} {1000 * seconds:7.1f} ms")
    say(f"switch {1000 * figures.switch_s:.1f} ms    bytes {1000 * figures.bytes_s:.1f} ms    ratio {figures.ratio_to_bytes:.2f}")


def num_layers(megabytes: float) -> int:
    """So many that the weights have at least this size."""
    hidden, queries = WIDE["hidden_size"], WIDE["num_attention_heads"] * WIDE["head_dim"]
    keys = WIDE["num_key_value_heads"] * WIDE["head_dim"]
    per_layer = hidden * (2 * queries + 2 * keys + 3 * WIDE["intermediate_size"])
    return max(1, -int(-(megabytes * 1e6 / 4 - VOCABULARY * hidden) // per_layer))


async def switch_cell(model_dir: Path, scratch: Path, kind: str, switches: int) -> Figures:
    from qwengyre.engines.model import read_weights
    from qwengyre.runtime.cell_client import CellClient
    from qwengyre.runtime.launchers.local import LocalLauncher

    owner = open_bench_carrier(kind, PREFIX)
    weights = owner.expose(read_weights(model_dir), version=1, epoch=0)
    launcher = LocalLauncher(scratch, scratch, DEADLINE_S)
    spec = cell_spec(model_dir, kind)
    life = await launcher.launch("cell", spec)
    client = CellClient(life.address, spec.token)
    phases: dict[str, list[float]] = {}
    bytes_s = []
    try:
        for index in range(switches + 1):
            timed = await _there_and_back(client, weights, index)
            read_s = [_read_whole(owner, weights) for _ in range(2)]
            if index:
                bytes_s.append(sum(read_s))
                for phase, seconds in timed.items():
                    phases.setdefault(phase, []).append(seconds)
    finally:
        await client.close()
        await life.stop()
        owner.close()
    medians = {phase: float(np.median(seconds)) for phase, seconds in phases.items()}
    switch_s, moved_s = sum(medians.values()), float(np.median(bytes_s))
    return Figures(kind, weights.num_bytes / 1e6, switches, medians, switch_s, moved_s, switch_s / moved_s)


def cell_spec(model_dir: Path, kind: str) -> CellSpec:
    from qwengyre.engines.config import EngineConfig
    from qwengyre.runtime.cell import CellSpec
    from qwengyre.trainer.config import TrainerConfig
    from qwengyre.transfer.config import TransferConfig

    return CellSpec(
        cell=1,
        epoch=0,
        model_dir=str(model_dir),
        segment_prefix=PREFIX,
        token=secrets.token_hex(16),
        threads=1,
        engine=EngineConfig(),
        trainer=TrainerConfig(),
        collective_timeout_s=DEADLINE_S,
        has_trainer=True,
        transfer=msgspec.convert({"carrier": kind}, TransferConfig),
    )


async def _there_and_back(client: CellClient, weights: Exposure, step: int) -> dict[str, float]:
    from qwengyre.runtime import cell_api as api

    phases_s: dict[str, float] = {}
    for operation in (api.EnterTraining(), api.BeginStep(step, weights), api.EnterRollout(weights, weights.version)):
        phases_s |= (await client.call(operation, api.Done, DEADLINE_S)).phases_s
    return phases_s


def _read_whole(carrier: Carrier, weights: Exposure) -> float:
    """Seconds to read everything as one region into memory just taken."""
    whole = Region("all", 0, weights.num_bytes, "|u1", (weights.num_bytes,))
    began = time.perf_counter()
    carrier.read(msgspec.structs.replace(weights, regions=(whole,)))
    return time.perf_counter() - began
