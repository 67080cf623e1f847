"""Replay recorded harness traffic through a gateway, as its clients sent it, against an engine that says what was recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import GenerateRequest
from qwengyre.gateway.app import HarnessApp
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.gateway import Execution, Gateway, open_journal
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.asgi_client import Exchange, begin
from qwengyre.testing.capture_variations import Vary
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.trajectory.records import Opened

CALL_PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
EXECUTION, SERVER = ExecutionId("e000001-0"), ServerId("cell-0")
TOKENS_PER_CHUNK = 7


class RecordedAnswer(msgspec.Struct):
    """What the model answered, whatever the dialect."""

    text: str
    reasoning: str
    tools: list[tuple[str, str, str]]
    """(recorded id, name, raw arguments)"""

    def sampled(self) -> str:
        """As the policy would write it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>' for _, name, raw in self.tools]
        return thought + "\n".join(part for part in (self.text, *calls) if part) + "<|im_end|>"


def load(capture: Path) -> list[dict[str, Any]]:
    """The requests of a recording, in the order in which they came. Raises ConfigError for a file that is not a recording."""
    try:
        with gzip.open(capture) as file:
            rows = [json.loads(line) for line in file]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(f"this recording cannot be read: {error}", file=str(capture)) from error
    if not rows:
        raise ConfigError("this recording is empty", file=str(capture))
    return sorted(rows, key=lambda row: row["seq"])


def said(row: dict[str, Any]) -> RecordedAnswer:
    full = row["response"].get("full") or {}
    if row["proto"] == "anthropic":
        return _said_messages(full)
    if row["proto"] == "chat":
        return _said_chat(full)
    return _said_responses(full)


def _said_messages(full: dict[str, Any]) -> RecordedAnswer:
    out = RecordedAnswer("", "", [])
    for block in full.get("content", ()):
        if block["type"] == "thinking":
            out.reasoning += block["thinking"]
        elif block["type"] == "text":
            out.text += block["text"]
        else:
            out.tools.append((block["id"], block["name"], block.get("_raw_args") or json.dumps(block["input"])))
    return out


def _said_chat(full: dict[str, Any]) -> RecordedAnswer:
    message = full["choices"][0]["message"] if full.get("choices") else {}
    tools = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return RecordedAnswer(message.get("content") or "", message.get("reasoning_content") or "", tools)


def _said_responses(full: dict[str, Any]) -> RecordedAnswer:
    out = RecordedAnswer("", "", [])
    for item in full.get("output", ()):
        if item["type"] == "reasoning":
            out.reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
        elif item["type"] == "message":
            out.text += "".join(part["text"] for part in item["content"])
        else:
            out.tools.append((item["call_id"], item["name"], item["arguments"]))
    return out


def with_words_of_history(rows: list[dict[str, Any]]) -> dict[int, RecordedAnswer]:
    """The recordings' answers by seq. Codex's requests kept their words while its answers were replaced by pseudo-words:
    there the history says what the answer was."""
    answers = {row["seq"]: said(row) for row in rows if row["path"] in CALL_PATHS}
    if not any(row["proto"] == "responses" for row in rows):
        return answers
    history: dict[str, tuple[str, str]] = {}
    for row in rows:
        text = reasoning = ""
        for item in (row["body"] or {}).get("input", ()):
            kind = item.get("type")
            if kind == "reasoning":
                reasoning = "".join(part["text"] for part in item.get("content") or item["summary"])
            elif kind == "message" and item["role"] == "assistant":
                text = "".join(part["text"] for part in item["content"])
            elif kind == "function_call":
                history[item["call_id"]] = (text, reasoning)
            else:
                text = reasoning = ""
    for answer in answers.values():
        if answer.tools and answer.tools[0][0] in history:
            answer.text, answer.reasoning = history[answer.tools[0][0]]
    asked = {json.dumps(row["body"]["input"], sort_keys=True): row["seq"] for row in rows}
    return {row["seq"]: answers[asked[json.dumps(row["body"]["input"], sort_keys=True)]] for row in rows}


class Replay:
    """One capture on its way through one gateway."""

    def __init__(
        self, capture: Path, rendering: Rendering, folder: Path, *, stream: bool | None = None, vary: Vary | None = None
    ):
        self.rows = [row for row in load(capture) if row["path"] in CALL_PATHS]
        self.answers = with_words_of_history(self.rows)
        if vary is not None:
            self.rows = vary(self.rows)
            self.answers |= {row["seq"]: self.answers[row["of"]] for row in self.rows if "of" in row}
        self.stream = stream
        config = GatewayConfig(max_context_tokens=1 << 20, max_tokens_per_call=1 << 16)
        self.rendering = rendering
        self._journal = open_journal(folder / "journal", config)
        self.gateway = Gateway(config, rendering, self._journal, b"s" * 32, lambda: 1.0)
        self.app = HarnessApp(self.gateway)
        self.engine = ScriptedEngine(self._script, max_context_tokens=1 << 20, tokens_per_chunk=TOKENS_PER_CHUNK, held=True)
        self.calls: dict[int, int] = {}
        """Number of a call of the gateway by seq of its request."""
        self.bodies: dict[int, bytes] = {}
        """What came back, by seq."""
        self._asking = asyncio.Lock()
        self._ids: dict[str, str] = {}
        self._answer_of: dict[int, int] = {}

    async def run(self, order: list[list[int]] | None = None) -> Execution:
        """Send everything, groups of `order` (seqs) at once and in turn; give the execution after its close."""
        stop = asyncio.Event()
        serving = asyncio.ensure_future(self.gateway.serve(stop))
        await asyncio.sleep(0)
        opened = Opened(-1, EXECUTION, 0, 7, 1.0, True, 1 << 20, 1 << 16, "policy")
        self.execution = await self.gateway.open(opened)
        await self.gateway.set_server(SERVER, self.engine)
        self.execution.route.set(SERVER)
        by_seq = {row["seq"]: row for row in self.rows}
        for group in order or [[row["seq"]] for row in self.rows]:
            await asyncio.gather(*(self._send(by_seq[seq]) for seq in group))
        await self.gateway.close(EXECUTION)
        stop.set()
        await serving
        self._journal.close()
        return self.execution

    async def _send(self, row: dict[str, Any]) -> None:
        fault = row["response"].get("fault") or {}
        if fault.get("kind") == "status" and fault.get("code") == 400:
            return  # the context overflow of another engine
        async with self._asking:
            exchange, number = await self._ask(row)
        await self._hear(row, fault, exchange, number)

    async def _ask(self, row: dict[str, Any]) -> tuple[Exchange, int]:
        """Send one request; the gateway's number of it is known when it was accepted."""
        number = len(self.execution.session.calls)
        exchange = begin(self.app, "POST", _path(row), headers=self._headers(row), body=self._body(row))
        self._answer_of[number] = row["seq"]
        while len(self.execution.session.calls) == number and not exchange.is_done:
            await asyncio.sleep(0)
        assert len(self.execution.session.calls) == number + 1, exchange.body
        self.calls[row["seq"]] = number
        return exchange, number

    async def _hear(self, row: dict[str, Any], fault: dict[str, Any], exchange: Exchange, number: int) -> None:
        call = self.execution.session.calls[number]
        num_tokens = len(self._ids_of(row["seq"])) - call.started.first_index
        if not fault:
            await self.engine.grant(f"{call.id}#1", num_tokens)
            await exchange.finish()
            assert exchange.status == 200, exchange.body
            self.bodies[row["seq"]] = exchange.body
        elif fault["kind"] == "disconnect":
            half = num_tokens // 2 // TOKENS_PER_CHUNK * TOKENS_PER_CHUNK
            await self.engine.grant(f"{call.id}#1", half)
            while call.num_sampled < half:
                await asyncio.sleep(0)
            await exchange.hang_up()
        else:
            await exchange.hang_up()
        self._learn_ids(row["seq"], number)

    def _learn_ids(self, seq: int, number: int) -> None:
        session = self.execution.session
        asked = session.calls[number].started
        for index, (recorded, _, _) in enumerate(self.answers[seq].tools):
            self._ids[recorded] = session.tool_use_id(asked, index)

    def _body(self, row: dict[str, Any]) -> bytes:
        body = dict(row["body"])
        if self.stream is not None:
            body["stream"] = self.stream
        if isinstance(body.get("tool_choice"), str):
            body["tool_choice"] = "auto"  # all harnesses sent this word; the recordings have a pseudo-word in its place
        text = json.dumps(body, ensure_ascii=False)
        if self._ids:
            pattern = "|".join(map(re.escape, self._ids))
            text = re.sub(pattern, lambda found: self._ids[found.group()], text)
        return text.encode()

    def _headers(self, row: dict[str, Any]) -> dict[str, str]:
        hidden = ("authorization", "x-api-key", "content-length", "content-encoding")
        headers = {name.lower(): value for name, value in row["headers"] if name.lower() not in hidden}
        return headers | {"authorization": f"Bearer {self.execution.keys.key}"}

    def _ids_of(self, seq: int) -> list[int]:
        return list(self.rendering.tokenizer.encode(self.answers[seq].sampled()))

    def _script(self, request: GenerateRequest) -> list[int]:
        number = int(request.request_id.partition("#")[0].rpartition("c")[2])
        return self._ids_of(self._answer_of[number])[request.sampling.first_index :]


def _path(row: dict[str, Any]) -> str:
    query = "&".join(f"{key}={value}" for key, value in row["query"].items())
    return f"{row['path']}?{query}".rstrip("?")
