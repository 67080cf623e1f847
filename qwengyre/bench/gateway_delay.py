"""What a gateway on one core adds to each chunk of many streams, beside a paced engine in another process."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from qwengyre.bench.gateway import DEADLINE_S, _request
from qwengyre.bench.gateways import SERVER, Door, Stream, gateways
from qwengyre.bench.output import say
from qwengyre.bench.stamping_engine import ages_s
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.ids import ExecutionId
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.rpc.processes import start_process


class DelayFigures(msgspec.Struct, frozen=True):
    streams: int
    chunks: int
    """That came, of all streams."""
    lost_chunks: int
    chunks_per_s: float
    """That the engine sends once all streams run."""
    gateway_core_share: float
    """CPU time of the gateway over the time of the streams: of the one core that it has."""
    p50_added_ms: float
    p99_added_ms: float
    """From the moment in which the engine made a chunk until the client had read it: the engine's wire and the client are in it."""


async def _ages(stream: Stream) -> list[float]:
    """Seconds that each chunk took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stream.door.port)
    writer.write(_request(stream.key, {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}))
    ages: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                ages += ages_s(choice["delta"].get("content") or "")
    writer.close()
    return ages


def _share_cores(door: Door, engine: int) -> None:
    """One core for the gateway, the others for the engine and the clients, which are here."""
    first, *others = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{door.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {first})
    for pid in (engine, 0):
        os.sched_setaffinity(pid, others or {first})


async def measure(folder: Path, num_streams: int, num_chunks: int, pace_s: float) -> DelayFigures:
    ready, module = folder / "engine-ready", "qwengyre.bench.stamping_engine"
    arguments = [f"unix:{folder / 'e.sock'}", str(ready), str(num_chunks), str(pace_s)]
    engine = await start_process(module, arguments, folder / "engine-log", ready, env={}, timeout_s=DEADLINE_S)
    try:
        async with gateways(folder, ready.read_text(), 1) as ((door,), owner):
            _share_cores(door, engine.pid)
            streams = []
            for number in range(num_streams):
                opened = await owner.open(OpenExecution(ExecutionId(f"e{number:06d}-0"), server=SERVER))
                streams.append(Stream(door, opened.key))
            loop, cpu_s = asyncio.get_running_loop(), door.cpu_s()
            began = loop.time()
            ages = [age for stream in await asyncio.gather(*map(_ages, streams)) for age in stream]
            took_s = loop.time() - began
            cpu_s = door.cpu_s() - cpu_s
    finally:
        await engine.stop()
    p50, p99 = np.percentile(ages, [50, 99])
    return DelayFigures(
        streams=num_streams,
        chunks=len(ages),
        lost_chunks=num_streams * num_chunks - len(ages),
        chunks_per_s=num_streams / pace_s,
        gateway_core_share=cpu_s / took_s,
        p50_added_ms=1000 * float(p50),
        p99_added_ms=1000 * float(p99),
    )


def gateway_delay(
    num_streams: Annotated[int, typer.Option("--streams", help="Streamed calls at once, an execution each.")] = 1000,
    stream_chunks: Annotated[int, typer.Option(help="Chunks of each, of some fifteen tokens.")] = 60,
    pace_s: Annotated[float, typer.Option(help="Seconds between two chunks of one stream.")] = 0.5,
    json_target: JsonTarget = None,
) -> None:
    """What a gateway on one core adds to each chunk of many streams; the engine has a process of its own."""
    with tempfile.TemporaryDirectory(prefix="qg-") as name:
        found = asyncio.run(measure(Path(name), num_streams, stream_chunks, pace_s))
    write_json(json_target, found)
    say(
        f"{found.streams} streams, {found.chunks_per_s:.0f} chunks a second, {found.gateway_core_share:.0%} of the gateway's core: "
        f"{found.p50_added_ms:.0f} ms added at the median, {found.p99_added_ms:.0f} ms at the 99th percentile; {found.lost_chunks} of "
        f"{found.chunks + found.lost_chunks} chunks lost"
    )
