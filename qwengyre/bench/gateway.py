"""What the gateway costs: an execution that grows to 700,000 tokens, a thousand streams at once, one small call."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer

from qwengyre.bench.gateway_peer import added_by_peer
from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.arrays import pack
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import FinishReason, GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.remote import RemoteEngine
from qwengyre.engines.server import EngineServer
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.control_api import OpenExecution
from qwengyre.gateway.dialects import BY_NAME
from qwengyre.gateway.gateway import Execution, Gateway, open_journal
from qwengyre.gateway.protocol.dialect import AnswerHead
from qwengyre.gateway.rendering import Rendering
from qwengyre.rpc.tether import tethered
from qwengyre.runtime.gateway_client import GatewayClient
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.match import Turn
from qwengyre.trajectory.records import Opened

RENDERER: dict[str, str | bool | int] = {"name": "qwen3", "thinking_retention": "all"}
ANSWER_CHARS, RESULT_CHARS = 200, 440
EDGE_CALLS = 50
"""Calls at the start and at the end over which a time is averaged."""
DEADLINE_S = 60.0
"""For the gateway to answer its owner."""
TOKEN = b"bench"
SERVER = ServerId("s")


class GatewayFigures(msgspec.Struct):
    calls: int
    tokens: int
    ms_per_call_start: float
    """CPU of the gateway for a call at the start of the execution, JSON parsing included."""
    ms_per_call_end: float
    ms_json_end: float
    """Of which decoding the request body as plain JSON would take."""
    encoded_tokens_max: int
    """Most tokens that one call had to encode, the first call aside."""
    memory_mb: float
    bytes_per_distinct_token: float
    streams: int
    tokens_per_stream: int
    lost_chunks: int
    p50_added_ms: float
    p99_added_ms: float
    """From the engine's token to the client's chunk."""
    small_call_ms: float
    """A call of 30 tokens through the gateway, with the engine at no delay."""
    engine_call_ms: float
    """The same request asked of the engine's own socket."""
    cpu_ms_per_small_call: float
    overhead_vs_peer: float | None
    """Latency that the gateway adds to a small call, over what the proxy at --peer-url adds; None without one."""


class EchoEngine(ScriptedEngine):
    """Answers at once, keeps nothing: what is measured is the gateway."""

    def __init__(self, answer: Callable[[GenerateRequest], list[int]], *, pace_s: float = 0.0, tokens_per_chunk: int = 1):
        super().__init__()
        self._answer, self._pace_s, self._size = answer, pace_s, tokens_per_chunk
        self.said_at: dict[str, list[float]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        output = self._answer(request)
        times = self.said_at.setdefault(request.request_id.partition("/")[0], [])
        due = time.perf_counter()
        for start in range(0, len(output), self._size):
            if self._pace_s:
                due += self._pace_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tokens = tuple(output[start : start + self._size])
            times.append(time.perf_counter())
            reason: FinishReason | None = "stop" if start + self._size >= len(output) else None
            yield TokenChunk(request.request_id, tokens, (-0.5,) * len(tokens), 0, 0, reason)


def growth(folder: Path, num_calls: int) -> dict[str, float]:
    """One execution that grows by `num_calls` calls, in this process: CPU time is the gateway's own."""
    tokenizer = byte_tokenizer()
    counter = itertools.count()

    def answer(request: GenerateRequest) -> list[int]:
        text = f"{next(counter):>6} ".ljust(ANSWER_CHARS, "a")
        call = '\n<tool_call>\n{"name": "run", "arguments": {"cmd": "x"}}\n</tool_call><|im_end|>'
        return tokenizer.encode(text + call).ids

    rendering = Rendering.from_folder(write_byte_tokenizer(folder / "model"), RENDERER)
    config = GatewayConfig(max_context_tokens=1 << 21)
    journal = open_journal(folder / "journal", config)
    gateway = Gateway(config, rendering, journal, b"s" * 32, time.time)
    return asyncio.run(_grow(gateway, rendering, EchoEngine(answer, tokens_per_chunk=64), num_calls, journal.path))


async def _grow(gateway: Gateway, rendering: Rendering, engine: EchoEngine, num_calls: int, journal: Path) -> dict[str, float]:
    stop = asyncio.Event()
    serving = asyncio.ensure_future(gateway.serve(stop))
    await asyncio.sleep(0)
    execution = await gateway.open(Opened(-1, ExecutionId("e"), 0, 1, 1.0, True, 1 << 21, 1 << 16, "m"))
    await gateway.set_server(SERVER, engine)
    execution.route.set(SERVER)
    before = _rss_mb()
    system = {"role": "system", "content": "You are a coder."}
    messages: list[bytes] = [msgspec.json.encode(system), msgspec.json.encode({"role": "user", "content": "go"})]
    tools = b'[{"type":"function","function":{"name":"run","parameters":{"type":"object"}}}]'
    times, json_times, encoded = [], [], []
    for _ in range(num_calls):
        body = b'{"model":"m","tools":' + tools + b',"messages":[' + b",".join(messages) + b"]}"
        encoded_before = rendering.tokenizer.num_encoded_tokens
        began = time.process_time()
        turn = await _call(gateway, execution, body)
        times.append(time.process_time() - began)
        encoded.append(rendering.tokenizer.num_encoded_tokens - encoded_before)
        began = time.process_time()
        msgspec.json.decode(body)
        json_times.append(time.process_time() - began)
        use = turn.tool_uses[0]
        call = {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}
        messages.append(msgspec.json.encode({"role": "assistant", "content": turn.text, "tool_calls": [call]}))
        messages.append(msgspec.json.encode({"role": "tool", "tool_call_id": use.id, "content": "r" * RESULT_CHARS}))
    session = execution.session
    tokens = session.calls.num_distinct()
    figures = {
        "calls": num_calls,
        "tokens": tokens,
        "ms_per_call_start": 1000 * float(np.mean(times[1:EDGE_CALLS])),
        "ms_per_call_end": 1000 * float(np.mean(times[-EDGE_CALLS:])),
        "ms_json_end": 1000 * float(np.mean(json_times[-EDGE_CALLS:])),
        "encoded_tokens_max": max(encoded[1:]),
        "memory_mb": _rss_mb() - before - sum(map(len, messages)) / 1e6,
        "bytes_per_distinct_token": journal.stat().st_size / tokens,
    }
    stop.set()
    await serving
    return figures


async def _call(gateway: Gateway, execution: Execution, body: bytes) -> Turn:
    """What the listener does for a call, without HTTP."""
    request = BY_NAME["chat"].parse(body, execution.session.items)
    call, reader = await gateway.call(execution, request, {})
    while not call.answer.is_whole:
        await reader.event.wait()
        reader.event.clear()
    reader.take()
    call.conclude()
    said = call.answer.said(reader.position)
    BY_NAME["chat"].whole(request, AnswerHead(id="x", created=0, prompt_tokens=call.num_prompt), said, call.ending())
    call.detach(reader)
    await asyncio.sleep(0)
    return said.turn()


class ServedCall:
    """A gateway process in front of an engine of this process."""

    def __init__(self, folder: Path, engine: EchoEngine):
        self._folder, self._server = folder, EngineServer(engine, secret=TOKEN)

    async def __aenter__(self) -> ServedCall:
        folder = self._folder
        config = GatewayProcessConfig(
            model=str(write_byte_tokenizer(folder / "model")),
            journal=str(folder / "journal"),
            secret_file=str(folder / "secret"),
            control_socket=str(folder / "c.sock"),
            port=0,
            ready_file=str(folder / "ready"),
            gateway=GatewayConfig(renderer=RENDERER, max_context_tokens=1 << 20, max_calls_per_execution=4096),
        )
        (folder / "gateway.json").write_bytes(msgspec.json.encode(config))
        command = tethered("qwengyre.gateway", ["--config", str(folder / "gateway.json"), "--log-level", "WARNING"])
        self._process = await asyncio.create_subprocess_exec(*command)
        while not (folder / "ready").exists():
            await asyncio.sleep(0.05)
        self.port = json.loads((folder / "ready").read_text())["port"]
        self.address = await self._server.serve(f"unix:{folder / 'e.sock'}")
        self._owner = GatewayClient([Path(config.control_socket)], DEADLINE_S)
        await self._owner.add_server(ServerId("s"), self.address, TOKEN)
        return self

    async def ping(self) -> None:
        await self._owner.ping(DEADLINE_S)

    async def open(self, execution: str) -> str:
        opened = await self._owner.open(OpenExecution(ExecutionId(execution), server=ServerId("s")))
        return opened.key

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def __aexit__(self, *_: object) -> None:
        self._owner.close()
        self._process.terminate()
        await self._process.wait()
        await self._server.close()


async def streams(folder: Path, num_streams: int, num_tokens: int, pace_s: float) -> dict[str, float]:
    """Many streamed calls at once over TCP, one execution each; every token is a word of its own."""
    words = [word for number in range(num_tokens - 1) for word in byte_tokenizer().encode(chr(97 + number % 26)).ids]
    engine = EchoEngine(lambda request: [*words, *byte_tokenizer().encode("<|im_end|>").ids], pace_s=pace_s)
    added: list[float] = []
    lost = 0
    async with ServedCall(folder, engine) as served:
        keys = [await served.open(f"s{number}") for number in range(num_streams)]
        results = await asyncio.gather(*(_listen(served.port, key) for key in keys))
        for number, (text, heard) in enumerate(results):
            lost += len(words) - len(text)
            said = engine.said_at[f"s{number}"]
            added += [at - said[index] for index, at in enumerate(heard)]
    return {
        "streams": num_streams,
        "tokens_per_stream": num_tokens,
        "lost_chunks": lost,
        "p50_added_ms": 1000 * float(np.percentile(added, 50)),
        "p99_added_ms": 1000 * float(np.percentile(added, 99)),
    }


async def _listen(port: int, key: str) -> tuple[str, list[float]]:
    """One streamed call on a bare socket: its text, and when each character came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(key, {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}))
    text, heard = "", []
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            if line.startswith(b"data: [DONE]"):
                break
            continue
        new = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        text += new
        heard += [time.perf_counter()] * len(new)
    writer.close()
    return text, heard


def _request(key: str, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


async def small_calls(folder: Path, num_calls: int) -> dict[str, float]:
    """A small call through the gateway against the same call of the engine's socket."""
    output = byte_tokenizer().encode("a" * 29 + "<|im_end|>").ids
    async with ServedCall(folder, EchoEngine(lambda request: output, tokens_per_chunk=30)) as served:
        key = await served.open("e")
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{served.port}/v1", headers={"authorization": f"Bearer {key}"}
        ) as http:

            async def ask(number: int) -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
                (await http.post("/chat/completions", json=body)).raise_for_status()

            await ask(-1)
            cpu = served.cpu_s()
            through = await _timed(ask, num_calls)
            cpu = (served.cpu_s() - cpu) / num_calls
        remote = RemoteEngine(served.address, secret=TOKEN)
        sampling = Sampling(temperature=1.0, max_tokens=30, stop_token_ids=(), seed=1)
        prompt = pack(range(40), np.dtype("<i4"))

        async def ask_engine(number: int) -> None:
            async for _ in remote.generate(GenerateRequest(f"d/{number}", prompt, sampling)):
                pass

        await ask_engine(-1)
        direct = await _timed(ask_engine, num_calls)
        await remote.close()
    return {"small_call_ms": 1000 * through, "engine_call_ms": 1000 * direct, "cpu_ms_per_small_call": 1000 * cpu}


async def _timed(ask: Callable[..., Any], num_calls: int) -> float:
    """Median seconds of one call."""
    times = []
    for number in range(num_calls):
        began = time.perf_counter()
        await ask(number)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def gateway(
    calls: Annotated[int, typer.Option(help="Calls of the growing execution; 1,000 make 700,000 tokens.")] = 1000,
    num_streams: Annotated[int, typer.Option("--streams", help="Streamed calls at once.")] = 1000,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 200,
    pace_s: Annotated[float, typer.Option(help="Seconds between two tokens of one stream.")] = 0.5,
    peer_url: Annotated[str, typer.Option(help="Base URL of another proxy to compare with (bench/gateway_peer.py).")] = "",
    upstream_port: Annotated[int, typer.Option(help="Port of the upstream that the other proxy asks.")] = 8199,
    json_target: JsonTarget = None,
) -> None:
    """Time, memory and disk of long executions; latency of many streams and of a small call."""
    with tempfile.TemporaryDirectory(prefix="qg-") as name:
        folders = (Path(name) / part for part in ("g", "s", "c"))
        figures = growth(next(folders), calls)
        figures |= asyncio.run(streams(_made(next(folders)), num_streams, stream_tokens, pace_s))
        figures |= asyncio.run(small_calls(_made(next(folders)), 200))
    peer = asyncio.run(added_by_peer(peer_url, upstream_port, 200)) if peer_url else None
    added = (figures["small_call_ms"] - figures["engine_call_ms"]) / 1000
    found = msgspec.convert({**figures, "overhead_vs_peer": added / peer if peer else None}, GatewayFigures)
    write_json(json_target, found)
    for field in found.__struct_fields__:
        value = getattr(found, field)
        say(f"{field:28} {value:.3f}" if isinstance(value, float) else f"{field:28} {value}")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6
