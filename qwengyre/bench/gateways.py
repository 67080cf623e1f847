"""What a streamed chunk costs a gateway, against a plain pass-through of the same web server; and what two gateways carry against one.

By CPU time of each process: on a machine with few cores, client, engine and gateways take turns, and the clock would measure that.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from qwengyre.bench.gateway import DEADLINE_S, RENDERER, EchoEngine, _request
from qwengyre.bench.output import say
from qwengyre.bench.pass_through import SECRET
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.server import EngineServer
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.gateway.keys import load_secret
from qwengyre.rpc.processes import start_process
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.runtime.gateway_process import GatewayProcess
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer

SERVER = ServerId("s")


class Door(msgspec.Struct, frozen=True):
    """A process that streams."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Of all its threads, to the nanosecond: `/proc/PID/stat` counts in ticks of ten milliseconds."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class Stream(msgspec.Struct, frozen=True):
    door: Door
    key: str


class Carried(msgspec.Struct, frozen=True):
    """What the processes of one arrangement carried."""

    chunks: int
    cpu_s: list[float]
    """Of each process, for all chunks together."""

    @property
    def cpu_us_per_chunk(self) -> float:
        return 1e6 * sum(self.cpu_s) / self.chunks

    @property
    def chunks_per_s(self) -> float:
        """That it can carry, when each process has a core: the busiest one is full."""
        return self.chunks / max(self.cpu_s)


class GatewaysFigures(msgspec.Struct):
    streams: int
    """At once through the pass-through, through the one gateway, and through each of several: a chunk costs more where fewer come together."""
    tokens: int
    pass_through_chunks: int
    gateway_chunks: int
    """Events that came. A gateway that is kept from its core sends what has come meanwhile as one: then the figures say less."""
    pass_through_us: float
    """CPU of a plain pass-through for a chunk."""
    gateway_us: float
    """CPU of one gateway for a chunk."""
    gateway_chunks_per_core_s: float
    share_of_pass_through: float
    """Chunks that a gateway carries on a core, of those that a pass-through does."""
    several: int
    several_us: float
    """CPU of all of several gateways for a chunk."""
    several_vs_one: float
    """Chunks that several gateways carry, each on a core of its own, against one."""


async def carry(streams: list[Stream], doors: list[Door]) -> Carried:
    before = [door.cpu_s() for door in doors]
    chunks = await asyncio.gather(*(_count_chunks(stream) for stream in streams))
    return Carried(sum(chunks), [door.cpu_s() - cpu for door, cpu in zip(doors, before, strict=True)])


async def _count_chunks(stream: Stream) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", stream.door.port)
    writer.write(_request(stream.key, {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}))
    found = 0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        found += line.startswith(b"data: {") and b'"content":"' in line
    writer.close()
    return found


@asynccontextmanager
async def gateways(folder: Path, engine: str, num: int) -> AsyncIterator[tuple[list[Door], GatewayClient]]:
    """`num` gateways as a run has them, in front of one engine."""
    load_secret(folder / "secret")
    async with AsyncExitStack() as stack:
        processes = []
        for number in range(num):
            config = GatewayProcessConfig(
                model=str(write_byte_tokenizer(folder / "model")),
                journal=str(folder / f"journal-{number}"),
                secret_file=str(folder / "secret"),
                control_socket=str(folder / f"c{number}.sock"),
                port=0,
                ready_file=str(folder / f"ready-{number}"),
                number=number,
                gateway=GatewayConfig(renderer=RENDERER, processes=num),
            )
            process = GatewayProcess(config, folder, folder, RuntimeConfig(start_timeout_s=DEADLINE_S, heartbeat_s=DEADLINE_S))
            stack.push_async_callback(process.stop)
            await process.start()
            processes.append(process)
        owner = GatewayClient([process.control_socket for process in processes], DEADLINE_S)
        stack.callback(owner.close)
        await owner.add_server(SERVER, engine, SECRET)
        told = [json.loads((folder / f"ready-{number}").read_text()) for number in range(num)]
        yield [Door(one["pid"], one["port"]) for one in told], owner


async def through_gateways(folder: Path, engine: str, num: int, num_streams: int) -> Carried:
    folder.mkdir()
    async with gateways(folder, engine, num) as (doors, owner):
        streams = []
        for number in range(num_streams):
            execution = ExecutionId(f"e{number // 8:06d}-{number % 8}")
            opened = await owner.open(OpenExecution(execution, server=SERVER))
            streams.append(Stream(doors[owner.number_of(execution)], opened.key))
        return await carry(streams, doors)


async def passed_through(folder: Path, engine: str, num_streams: int) -> Carried:
    folder.mkdir()
    ready, module = folder / "ready", "qwengyre.bench.pass_through"
    process = await start_process(module, [engine, str(ready)], folder / "log", ready, env={}, timeout_s=DEADLINE_S)
    try:
        door = msgspec.json.decode(ready.read_bytes(), type=Door)
        return await carry([Stream(door, "none")] * num_streams, [door])
    finally:
        await process.stop()


async def measure(folder: Path, num: int, num_streams: int, num_tokens: int, pace_s: float) -> GatewaysFigures:
    words = [word for number in range(num_tokens) for word in byte_tokenizer().encode(chr(97 + number % 26)).ids]
    output = [*words, *byte_tokenizer().encode("<|im_end|>").ids]
    server = EngineServer(EchoEngine(lambda request: output, pace_s=pace_s), secret=SECRET)
    engine = await server.serve(f"unix:{folder / 'e.sock'}")
    try:
        plain = await passed_through(folder / "plain", engine, num_streams)
        one = await through_gateways(folder / "one", engine, 1, num_streams)
        several = await through_gateways(folder / "several", engine, num, num * num_streams)
    finally:
        await server.close()
    return GatewaysFigures(
        streams=num_streams,
        tokens=num_streams * num_tokens,
        pass_through_chunks=plain.chunks,
        gateway_chunks=one.chunks,
        pass_through_us=plain.cpu_us_per_chunk,
        gateway_us=one.cpu_us_per_chunk,
        gateway_chunks_per_core_s=one.chunks_per_s,
        share_of_pass_through=plain.cpu_us_per_chunk / one.cpu_us_per_chunk,
        several=num,
        several_us=several.cpu_us_per_chunk,
        several_vs_one=several.chunks_per_s / one.chunks_per_s,
    )


def bench_gateways(
    several: Annotated[int, typer.Option(min=2, help="Gateways that are put beside one.")] = 2,
    num_streams: Annotated[int, typer.Option("--streams", help="Streamed calls at once, an execution each.")] = 64,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 200,
    pace_s: Annotated[float, typer.Option(help="Seconds between two tokens of one stream.")] = 0.1,
    json_target: JsonTarget = None,
) -> None:
    """CPU of a streamed chunk: a gateway against a plain pass-through, and several gateways against one."""
    with tempfile.TemporaryDirectory(prefix="qg-") as name:
        found = asyncio.run(measure(Path(name), several, num_streams, stream_tokens, pace_s))
    write_json(json_target, found)
    for field in found.__struct_fields__:
        value = getattr(found, field)
        say(f"{field:28} {value:.3f}" if isinstance(value, float) else f"{field:28} {value}")
