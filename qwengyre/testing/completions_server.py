"""An OpenAI-compatible completions server that takes and returns token ids, as vLLM does, with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

Answer = Callable[[list[int]], Sequence[int]]
"""Prompt to output, the stop token included."""
HEAD = b"HTTP/1.1 %s\r\ncontent-type: %s\r\nconnection: close\r\n\r\n"


class CompletionsServer:
    """Use as an async context manager; `url` is its base URL. With `held`, an answer stops after its first token until `go` is set."""

    def __init__(self, answer: Answer, *, model: str = "policy", max_model_len: int = 4096, held: bool = False):
        self._answer, self._model, self._max_model_len, self._held = answer, model, max_model_len, held
        self.go = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the completions asked for."""
        self.num_left = 0
        """Clients that hung up in mid-answer."""

    async def __aenter__(self) -> CompletionsServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next((int(line.partition(":")[2]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
            body = await reader.readexactly(length)
            if head.startswith("get "):
                entry = {"id": self._model, "object": "model", "max_model_len": self._max_model_len}
                self._say(writer, b"200 OK", {"object": "list", "data": [entry]})
            else:
                await self._complete(json.loads(body), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_left += 1
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        wanted = len(body["prompt"]) + body["max_tokens"]
        if wanted > self._max_model_len:
            message = (
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested {wanted} tokens"
            )
            self._say(writer, b"400 Bad Request", {"error": {"message": message, "code": 400}})
            return
        output = list(self._answer(body["prompt"]))[: body["max_tokens"]]
        writer.write(HEAD % (b"200 OK", b"text/event-stream"))
        for at, token in enumerate(output):
            if at == 1 and self._held:
                await self._wait_to_go(reader)
            reason = None if at + 1 < len(output) else "stop" if token in body["stop_token_ids"] else "length"
            logprobs = {"token_logprobs": [-0.5 - at / 64], "tokens": ["?"], "top_logprobs": [{}], "text_offset": [0]}
            choice = {"index": 0, "text": "?", "token_ids": [token], "logprobs": logprobs, "finish_reason": reason}
            writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")

    async def _wait_to_go(self, reader: asyncio.StreamReader) -> None:
        """Until told to go on. Raises ConnectionResetError when the client hangs up before."""
        going, leaving = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(reader.read())
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if leaving.done():
            raise ConnectionResetError
        leaving.cancel()

    @staticmethod
    def _say(writer: asyncio.StreamWriter, status: bytes, payload: dict[str, Any]) -> None:
        writer.write(HEAD % (status, b"application/json") + json.dumps(payload).encode())
