"""What an abusive execution costs the others at the gateway: their calls and the heartbeat beside it, in turn with and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import typer

from qwengyre.bench.gateway import EchoEngine, ServedCall, _request
from qwengyre.bench.output import say
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.rpc.tether import tethered
from qwengyre.testing.tokenizers import byte_tokenizer

NUM_NORMAL: Final = 4
PAUSE_S: Final = 0.02
"""Between two calls of a normal client."""
HEAD: Final = "POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
MB: Final = 1_000_000


class Abuse(msgspec.Struct, frozen=True):
    """What one kind of abusive client sends again and again, over several connections at once."""

    body: Callable[[int], bytes]
    """Of the n-th request."""
    connections: int = 8
    path: str = "chat/completions"
    is_whole: bool = True
    """Else the last byte is never sent."""


def _chat(messages: Sequence[Mapping[str, object]], **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ABUSES: Final = {
    "counts just below what is encoded elsewhere": Abuse(
        lambda n: json.dumps({"messages": _user(f"{n} " + "ab " * 6000)}).encode(), path="messages/count_tokens", connections=60
    ),
    "one text of 30 MB": Abuse(lambda n: _chat(_user(f"{n} " + "a b c " * (30 * MB // 6)))),
    "600,000 messages": Abuse(
        lambda n: _chat([*_user(str(n)), *({"role": ("assistant", "user")[i % 2], "content": "a"} for i in range(600_000))])
    ),
    "a million parts": Abuse(
        lambda n: _chat(
            [{"role": "user", "content": [{"type": "text", "text": str(n)}, *[{"type": "text", "text": "a"}] * 900_000]}]
        )
    ),
    "30 MB of escapes that are refused": Abuse(lambda n: _chat(_user("\n" * (15 * MB)))[:-1]),
    "arrays in arrays": Abuse(lambda n: b'{"messages":[],"metadata":[' + b"[]," * (10 * MB) + b"[]]}"),
    "20,000 empty messages": Abuse(
        lambda n: _chat([*_user(str(n)), *({"role": ("assistant", "user")[i % 2], "content": ""} for i in range(20_000))])
    ),
    "bodies that do not end": Abuse(lambda n: b" " * (30 * MB), is_whole=False, connections=60),
    "calls without end": Abuse(lambda n: _chat(_user(str(n))), connections=64),
    "idle connections": Abuse(lambda n: b"", connections=500, is_whole=False),
}


class FairnessFigures(msgspec.Struct, frozen=True):
    abuse: str
    calls: int
    p50_ms: float
    p99_ms: float
    """Of the calls of the normal clients."""
    heartbeat_max_ms: float
    p50_alone_ms: float
    p99_alone_ms: float
    heartbeat_max_alone_ms: float

    @property
    def added_ms(self) -> float:
        return self.p99_ms - self.p99_alone_ms


@contextlib.asynccontextmanager
async def _abusing(name: str, port: int, key: str) -> AsyncIterator[None]:
    """A process of its own: what it takes to send must not count."""
    if not name:
        yield
        return
    process = await asyncio.create_subprocess_exec(*tethered(__name__, [name, str(port), key]), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def abuse_for_ever(name: str, port: int, key: str) -> None:
    abuse = ABUSES[name]
    bodies = [abuse.body(n) for n in range(4)]
    print("begun", flush=True)
    await asyncio.gather(*(_abuse(abuse, bodies, port, key, n) for n in range(abuse.connections)))


async def _abuse(abuse: Abuse, bodies: list[bytes], port: int, key: str, number: int) -> None:
    while True:
        body = bodies[number % len(bodies)]
        number += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = HEAD.format(path=abuse.path, key=key, size=len(body) + (not abuse.is_whole))
                writer.write(head.encode() if body else b"")
                writer.write(body)
                await writer.drain()
                await reader.readuntil(b"\r\n\r\n")
            finally:
                writer.close()
        await asyncio.sleep(0)


async def _normal(port: int, key: str, until: float, took: list[float], numbers: Iterator[int]) -> None:
    while time.perf_counter() < until:
        request = _request(key, {"model": "m", "messages": _user(f"n{next(numbers)}")})
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0] + b" ", head
        writer.close()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)


async def _beat(served: ServedCall, until: float, took: list[float]) -> None:
    while time.perf_counter() < until:
        began = time.perf_counter()
        await served.ping()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)


async def _measured(served: ServedCall, keys: list[str], abuse: str, duration_s: float) -> tuple[list[float], list[float]]:
    """Seconds that each call of the normal clients, and each heartbeat, took."""
    calls: list[float] = []
    beats: list[float] = []
    numbers = iter(range(time.perf_counter_ns(), 1 << 63))
    async with _abusing(abuse, served.port, keys[0]):
        until = time.perf_counter() + duration_s
        await asyncio.gather(*(_normal(served.port, key, until, calls, numbers) for key in keys[1:]), _beat(served, until, beats))
    return calls, beats


async def _compare(folder: Path, name: str, duration_s: float, rounds: int) -> FairnessFigures:
    output = byte_tokenizer().encode("ok<|im_end|>").ids
    async with ServedCall(folder, EchoEngine(lambda request: output)) as served:
        keys = [await served.open(f"e{number:06d}-0") for number in range(NUM_NORMAL + 1)]
        for abuse in (name, ""):  # what an execution may have at once at first is not part of what it costs the others for hours
            await _measured(served, keys, abuse, duration_s)
        beside: tuple[list[float], list[float]] = [], []
        alone: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            for abuse, into in (("", alone), (name, beside)):
                for found, more in zip(into, await _measured(served, keys, abuse, duration_s), strict=True):
                    found += more

    def ms(values: list[float], share: float) -> float:
        return 1000 * float(np.percentile(values, share))

    return FairnessFigures(
        name,
        len(beside[0]),
        ms(beside[0], 50),
        ms(beside[0], 99),
        ms(beside[1], 100),
        ms(alone[0], 50),
        ms(alone[0], 99),
        ms(alone[1], 100),
    )


def fairness(
    duration_s: Annotated[float, typer.Option(help="Seconds of one turn.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Turns with and without, each.")] = 2,
    only: Annotated[str, typer.Option(help="The one abuse whose name begins so.")] = "",
    json_target: JsonTarget = None,
) -> None:
    """Calls of four normal executions, and heartbeats, beside one abusive execution, in turn with and without it."""
    found = []
    for name in ABUSES:
        if name.startswith(only):
            with tempfile.TemporaryDirectory(prefix="qg-") as folder:
                figures = asyncio.run(_compare(Path(folder), name, duration_s, rounds))
            found.append(figures)
            say(
                f"{name:46} p50 {figures.p50_ms:7.1f} ms ({figures.p50_alone_ms:.1f} alone), p99 {figures.p99_ms:7.1f} ms"
                f" ({figures.p99_alone_ms:.1f} alone, {figures.added_ms:+.1f}), longest heartbeat {figures.heartbeat_max_ms:.0f} ms"
                f" ({figures.heartbeat_max_alone_ms:.0f} alone), {figures.calls} calls"
            )
    write_json(json_target, found)


if __name__ == "__main__":
    asyncio.run(abuse_for_ever(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
