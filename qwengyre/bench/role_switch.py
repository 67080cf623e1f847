"""A cell changes its role and changes back: how long each phase takes, against the time to move the bytes."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import numpy as np
import typer

from qwengyre.bench.output import say
from qwengyre.bench.transports import TransportName, open_bench_transport
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.transfer.api import Exposure, Region, Transport

if TYPE_CHECKING:
    from qwengyre.cell.cell import CellSpec
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


class Switched(NamedTuple):
    phases_s: dict[str, float]
    cpu_s: float


class PhaseCost(NamedTuple):
    clock_s: float
    cpu_s: float


class SwitchFigures(msgspec.Struct, frozen=True):
    transport: str
    weights_mb: float
    switches: int
    """There and back counts as one."""
    phases_s: dict[str, float]
    """Medians by the clock, in the order of a switch. `join` is the read of the step's snapshot."""
    switch_cpu_s: float
    """Median CPU time of the cell and of the owner of the snapshot over a switch there and back."""
    bytes_cpu_s: float
    """Median CPU time to read the same snapshots, one for the trainer and one for the engine, each as one region into new memory."""
    ratio_to_bytes: float
    """Of CPU times, so that it does not depend on what else runs: on an idle machine a switch is busy from end to end."""
    ratio_by_clock: float


def role_switch(
    megabytes: Annotated[float, typer.Option(min=1, help="Size of the weights.")] = 220.0,
    switches: Annotated[int, typer.Option(min=1, help="How often the cell goes to training and back.")] = 5,
    transport: TransportName = "shm",
    json_target: JsonTarget = None,
) -> None:
    """Switch a real cell, a process with its own engine and trainer, there and back; time every phase against bare reads."""
    from qwengyre.testing.engines import write_tiny_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        shape = WIDE | {"num_hidden_layers": num_layers(megabytes), "vocab_size": VOCABULARY}
        model_dir = write_tiny_qwen3(Path(scratch) / "model", **shape)
        figures = asyncio.run(switch_cell(model_dir, Path(scratch), transport, switches))
    write_json(json_target, figures)
    say(f"{figures.weights_mb:.0f} MB of weights over {transport}, {switches} times to training and back")
    for phase, seconds in figures.phases_s.items():
        say(f"  {phase:16} {1000 * seconds:7.1f} ms")
    say(f"CPU time: switch {1000 * figures.switch_cpu_s:.1f} ms    bytes {1000 * figures.bytes_cpu_s:.1f} ms")
    say(f"ratio_to_bytes {figures.ratio_to_bytes:.2f}    by the clock {figures.ratio_by_clock:.2f}")


def num_layers(megabytes: float) -> int:
    """So many that the weights have at least this size."""
    hidden, queries = WIDE["hidden_size"], WIDE["num_attention_heads"] * WIDE["head_dim"]
    keys = WIDE["num_key_value_heads"] * WIDE["head_dim"]
    per_layer = hidden * (2 * queries + 2 * keys + 3 * WIDE["intermediate_size"])
    return max(1, -int(-(megabytes * 1e6 / 4 - VOCABULARY * hidden) // per_layer))


async def switch_cell(model_dir: Path, scratch: Path, kind: str, switches: int, device: str = "cpu") -> SwitchFigures:
    from qwengyre.engines.model import read_weights
    from qwengyre.launchers.local import LocalLauncher
    from qwengyre.runtime.cell_client import CellClient

    owner = open_bench_transport(kind, PREFIX)
    weights = owner.expose(read_weights(model_dir), version=1, incarnation=0)
    launcher = LocalLauncher(scratch, scratch, DEADLINE_S)
    spec = cell_spec(model_dir, kind, device)
    life = await launcher.launch("cell", spec)
    client = CellClient(life.address, spec.secret)
    switched, read = [], []
    try:
        for _ in range(switches + 1):
            switched.append(await _there_and_back(client, weights, life.address.pid))
            read.append(_read_twice(owner, weights))
    finally:
        client.close()
        await life.stop()
        owner.close()
    return _figures(kind, weights, switched[1:], read[1:])


def _figures(kind: str, weights: Exposure, switched: list[Switched], read: list[PhaseCost]) -> SwitchFigures:
    phases_s = {phase: _median([one.phases_s[phase] for one in switched]) for phase in switched[0].phases_s}
    switch_cpu_s, bytes_cpu_s = _median([one.cpu_s for one in switched]), _median([one.cpu_s for one in read])
    return SwitchFigures(
        transport=kind,
        weights_mb=weights.num_bytes / 1e6,
        switches=len(switched),
        phases_s=phases_s,
        switch_cpu_s=switch_cpu_s,
        bytes_cpu_s=bytes_cpu_s,
        ratio_to_bytes=switch_cpu_s / bytes_cpu_s,
        ratio_by_clock=sum(phases_s.values()) / _median([one.clock_s for one in read]),
    )


def _median(values: list[float]) -> float:
    return float(np.median(values))


def cell_spec(model_dir: Path, kind: str, device: str) -> CellSpec:
    from qwengyre.cell.cell import CellSpec
    from qwengyre.engines.config import EngineConfig
    from qwengyre.trainer.config import TrainerConfig
    from qwengyre.transfer.config import TransferConfig

    return CellSpec(
        cell=1,
        incarnation=0,
        model_dir=str(model_dir),
        segment_prefix=PREFIX,
        secret=secrets.token_bytes(32),
        threads=1,
        engine=msgspec.convert({"device": device}, EngineConfig),
        trainer=msgspec.convert({"device": device}, TrainerConfig),
        collective_timeout_s=DEADLINE_S,
        has_trainer=True,
        transfer=msgspec.convert({"transport": kind}, TransferConfig),
    )


async def _there_and_back(client: CellClient, weights: Exposure, pid: int) -> Switched:
    from qwengyre.cell import api

    phases_s: dict[str, float] = {}
    before = time.process_time() + process_cpu_s(pid)
    for operation in (api.EnterTraining(), api.BeginStep(0, weights), api.EnterRollout(weights, weights.version)):
        phases_s |= (await client.call(operation, api.Timed, DEADLINE_S)).phases_s
    return Switched(phases_s, time.process_time() + process_cpu_s(pid) - before)


def process_cpu_s(pid: int) -> float:
    """CPU time of the threads that a process has now."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _read_twice(transport: Transport, weights: Exposure) -> PhaseCost:
    """Everything as one region into memory just taken."""
    whole = Region("all", 0, weights.num_bytes, "|u1", (weights.num_bytes,))
    snapshot = msgspec.structs.replace(weights, regions=(whole,))
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(2):
        transport.read(snapshot)
    return PhaseCost(time.perf_counter() - clock, time.process_time() - cpu)
