"""`python -m qwengyre.bench.pass_through ENGINE READY`: what a gateway cannot be cheaper than.

The web server, the engine's wire and the event of each token are those of a gateway; nothing is rendered, matched, parsed or recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qwengyre.core.arrays import pack
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.remote import RemoteEngine
from qwengyre.gateway.listener import HttpServer, allow_open_files, tcp_listener
from qwengyre.rpc.processes import announce

SECRET = b"bench"
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
SAMPLING = Sampling(temperature=1.0, max_tokens=1 << 20, stop_token_ids=(), seed=1)
PROMPT = pack(range(40), np.dtype("<i4"))


class PassThrough:
    """An ASGI application: every POST is a streamed completion, an event for each chunk of the engine."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine, self._numbers = engine, itertools.count()

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        request = GenerateRequest(f"p{next(self._numbers)}/c0#1", PROMPT, SAMPLING)
        async for chunk in self._engine.generate(request):
            choice = {"index": 0, "delta": {"content": chr(97 + chunk.token_ids[0] % 26)}, "finish_reason": None}
            event = {"id": request.request_id, "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            body = b"data: " + msgspec.json.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def main(engine: str, ready: Path) -> None:
    allow_open_files()
    listener = tcp_listener("127.0.0.1", 0)
    server = HttpServer(PassThrough(RemoteEngine(engine, secret=SECRET)), listener)
    await server.begin()
    announce(ready, msgspec.json.encode({"pid": os.getpid(), "port": listener.getsockname()[1]}))
    await server.main_loop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
