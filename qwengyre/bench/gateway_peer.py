"""What another proxy adds to a small call, to compare with. It is started by hand in front of the upstream of this module:

litellm --model openai/m --api_base http://127.0.0.1:8199/v1 --port 4000
qwengyre bench gateway --peer-url http://127.0.0.1:4000/v1 --upstream-port 8199
"""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
from numpy.typing import NDArray

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a" * 29}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 30, "total_tokens": 40},
    }
).encode()


async def added_by_peer(peer_url: str, upstream_port: int, num_calls: int) -> float:
    """Median seconds that the proxy at `peer_url` adds to a call that its upstream, here, answers at once."""
    connections: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await _answer(reader, writer)

    async with await asyncio.start_server(answer, "127.0.0.1", upstream_port):
        direct = await _times(f"http://127.0.0.1:{upstream_port}/v1", num_calls)
        through = await _times(peer_url, num_calls)
        for connection in connections:
            connection.close()
            await connection.wait_closed()
    return float(np.median(through) - np.median(direct))


async def _times(base_url: str, num_calls: int) -> NDArray[np.float64]:
    loop = asyncio.get_running_loop()
    times = np.empty(num_calls)
    async with httpx.AsyncClient(base_url=base_url, headers={"authorization": "Bearer sk-none"}, timeout=60.0) as http:
        for number in range(-1, num_calls):
            body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
            began = loop.time()
            (await http.post("/chat/completions", json=body)).raise_for_status()
            if number >= 0:
                times[number] = loop.time() - began
    return times


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A completions server in as few steps as possible: every request gets the same answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    try:
        while True:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
            await reader.readexactly(length)
            writer.write(head + ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
