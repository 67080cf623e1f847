"""Random requests through the gateway's own application, in this process, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import GenerateRequest
from qwengyre.gateway.app import HarnessApp
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.gateway import Execution, Gateway, open_journal
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.asgi_client import Exchange, begin
from qwengyre.testing.broken_requests import broken
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.heard import events, turn_heard
from qwengyre.testing.random_requests import HARMLESS, Asked, ask
from qwengyre.trajectory.records import Opened

CONTEXT: Final = 1 << 18
REQUESTS_PER_ENGINE: Final = 50
"""A scripted engine keeps all that it was ever asked."""
SETTINGS: Final = {"name": "qwen3", "enable_thinking": True, "thinking_retention": "all"}


class RandomCompletion(msgspec.Struct, frozen=True):
    """What the policy says, and what a client is to hear of it when nothing cuts it."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, dict[str, str]], ...]

    def written(self) -> str:
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else "<think>\n\n</think>\n\n"
        calls = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
            for name, arguments in self.calls
        ]
        return thought + "\n".join(part for part in (self.text, *calls) if part) + "<|im_end|>"


def random_answer(rnd: random.Random, asked: Asked) -> RandomCompletion:
    text = f"{rnd.randrange(10**6)}{rnd.choice(HARMLESS)} end" if rnd.random() < 0.8 else ""
    if asked.stops and rnd.random() < 0.4:
        text = f"before {rnd.choice(asked.stops)} behind {text}"
    names = [rnd.choice((*asked.tools, "unknown_tool")) for _ in range(rnd.choice((0, 0, 1, 2)))] if asked.tools else []
    calls = tuple((name, {"a": f"{rnd.randrange(10**6)}{rnd.choice(HARMLESS)}"}) for name in names)
    return RandomCompletion("" if rnd.random() < 0.5 else f"thought {rnd.randrange(10**6)}", text, calls)


SERVER = ServerId("cell-0")


class Bench:
    """One gateway for all requests: what it keeps of them after their executions are closed would show."""

    def __init__(self, rendering: Rendering, folder: Path) -> None:
        config = GatewayConfig(max_context_tokens=CONTEXT, max_tokens_per_call=4096)
        self.rendering = rendering
        self._journal = open_journal(folder / "gateway.journal", config)
        clock = itertools.count(1000)
        self.gateway = Gateway(config, rendering, self._journal, b"s" * 32, lambda: float(next(clock)))
        self.app = HarnessApp(self.gateway)
        self.says = ""
        self.prompts: list[bytes] = []
        self._numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        """Serve; whatever breaks inside, the gateway stops with it."""
        stop = asyncio.Event()
        serving = asyncio.ensure_future(self.gateway.serve(stop))
        await asyncio.sleep(0)
        try:
            yield self
        finally:
            stop.set()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            self._journal.close()

    @contextlib.asynccontextmanager
    async def execution(self) -> AsyncIterator[Execution]:
        number = next(self._numbers)
        if number % REQUESTS_PER_ENGINE == 1:
            engine = ScriptedEngine(self._script, max_context_tokens=CONTEXT, tokens_per_chunk=13)
            await self.gateway.set_server(SERVER, engine)
        name = ExecutionId(f"e{number:06d}-0")
        live = await self.gateway.open(Opened(-1, name, 0, 7, 1.0, True, CONTEXT, 4096, "policy"))
        live.route.set(SERVER)
        try:
            yield live
        finally:
            await self.gateway.close(name)

    def _script(self, request: GenerateRequest) -> list[int]:
        first = request.sampling.first_index
        if not first:
            self.prompts.append(bytes(request.token_ids))
        return list(self.rendering.tokenizer.encode(self.says))[first:]

    async def post(self, live: Execution, path: str, body: bytes, **headers: str) -> Exchange:
        headers = {"authorization": f"Bearer {live.keys.key}", **headers}
        return await begin(self.app, "POST", path, headers=headers, body=body).finish()

    def prompt(self) -> str:
        return self.rendering.tokenizer.decode(list(memoryview(self.prompts[-1]).cast("i")))


async def hold(bench: Bench, rnd: random.Random, dialect: str) -> None:
    """One random request, and what must hold of its answer. Raises AssertionError with the request."""
    kind = rnd.choice(("valid", "valid", "valid", "refused", "broken", "broken"))
    asked = ask(rnd, dialect, is_refused=kind == "refused")
    said = random_answer(rnd, asked)
    bench.says = said.written()
    bench.prompts.clear()
    async with bench.execution() as live:
        if kind == "broken":
            body = broken(rnd, asked)
            headers = {"content-encoding": "gzip"} if rnd.random() < 0.05 else {}
            sent = gzip.compress(body) if headers and rnd.random() < 0.7 else body
            got = await bench.post(live, asked.path, sent, **headers)
            where = f"{dialect} broken: {body[:3000]!r}\nanswer {got.status} {got.body[:1000]!r}"
            assert 200 <= got.status < 500, where
            assert got.status != 200 or b'"error"' not in got.body or _ends(dialect, asked, got.body), where
            assert got.status == 200 or _refusal(dialect, got), where
            return
        got = await bench.post(live, asked.path, json.dumps(asked.body).encode())
        where = f"{dialect} {kind}: {json.dumps(asked.body)}\nsaid {said}\nanswer {got.status} {got.body[:3000]!r}"
        if kind == "refused":
            assert got.status == 400 and _refusal(dialect, got), where
            assert asked.do in json.loads(got.body)["error"]["message"], where
            return
        assert got.status == 200, where
        prompt = bench.prompt()
        lost = [
            text
            for text in asked.texts
            if text.strip() not in prompt and json.dumps(text, ensure_ascii=False)[1:-1] not in prompt
        ]
        assert not lost, f"{lost} not in the prompt {prompt!r}\n{where}"
        follow = turn_heard(dialect, got.body, is_stream=asked.stream)
        following = follow(asked.body)
        _heard(dialect, asked, said, following, where)
        bench.says = "<think>\n\n</think>\n\nsecond<|im_end|>"
        again = await bench.post(live, asked.path, json.dumps(following).encode())
        where += f"\nnext {json.dumps(following)}\nanswer {again.status} {again.body[:2000]!r}"
        assert again.status == 200, where
        calls = live.session.calls
        assert calls[1].started.cause == "extends", f"{calls[1].started.cause}\n{where}"


def _refusal(dialect: str, got: Exchange) -> bool:
    """Whether a refusal has the form that clients of the dialect read, and words."""
    error = json.loads(got.body)
    inner = error["error"]
    told = isinstance(inner["message"], str) and len(inner["message"]) > 10
    match dialect:
        case "messages":
            return told and error["type"] == "error" and isinstance(inner["type"], str) and error.keys() == {"type", "error"}
        case "gemini":
            return told and inner["code"] == got.status and isinstance(inner["status"], str)
        case _:
            return told and inner.keys() == {"message", "type", "param", "code"} and isinstance(inner["type"], str)


def _ends(dialect: str, asked: Asked, body: bytes) -> bool:
    """A stream that ended as streams end: the word `error` may stand in what was said."""
    if body.startswith(b"{"):
        return "error" not in json.loads(body) or json.loads(body)["error"] is None
    return all("error" not in event or event["error"] is None for event in events(body))


def _heard(dialect: str, asked: Asked, said: RandomCompletion, body: dict[str, Any], where: str) -> None:
    """Nothing that was said is lost, or changed."""
    reasoning, text, calls = _read(dialect, asked, body)
    if asked.max_tokens is not None and asked.max_tokens < 4096:
        whole = (said.written()).replace("<think>\n", "")
        half = "\ufffd"  # a letter that was cut
        assert text.strip().rstrip(half) in whole and reasoning.strip().rstrip(half) in whole, where
        return
    wanted_text, wanted_calls = said.text, said.calls
    cut = min((at for stop in asked.stops if (at := said.text.find(stop)) >= 0), default=-1)
    if cut >= 0:
        wanted_text, wanted_calls = said.text[:cut], ()
    if asked.calls == "none" and wanted_calls:
        assert calls == () and text.strip().startswith(wanted_text.strip()), where
        assert all(name in text for name, _ in wanted_calls), where
        return
    if asked.calls == "one":
        wanted_calls = wanted_calls[:1]
    assert (reasoning.strip(), text.strip(), calls) == (said.reasoning, wanted_text.strip(), wanted_calls), (
        f"heard {(reasoning, text, calls)}\n{where}"
    )


def _read(dialect: str, asked: Asked, body: dict[str, Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    """What the client will send back of the answer: reasoning, text, calls."""
    name = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}[dialect]
    before = asked.body[name]
    new = body[name][len(before) if isinstance(before, list) else 1 :]
    return READERS[dialect](new)


def _object(arguments: str) -> Any:
    """The arguments of a call, or what there is of them when it was cut."""
    with contextlib.suppress(ValueError):
        return json.loads(arguments)
    return arguments


def _chat(new: list[Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    said = new[0]
    calls = tuple((call["function"]["name"], _object(call["function"]["arguments"])) for call in said.get("tool_calls") or ())
    return said.get("reasoning_content") or "", said["content"] or "", calls


def _messages(new: list[Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    blocks = new[0]["content"]
    calls = tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use")
    texts = ["".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("thinking", "text")]
    return texts[0], texts[1], calls


def _responses(new: list[Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    calls = tuple((item["name"], _object(item["arguments"])) for item in new if item.get("type") == "function_call")
    texts = [
        "".join(part["text"] for item in new if item.get("type") == kind for part in item["content"])
        for kind in ("reasoning", "message")
    ]
    return texts[0], texts[1], calls


def _gemini(new: list[Any]) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    parts = new[0]["parts"]
    calls = tuple((part["functionCall"]["name"], part["functionCall"]["args"]) for part in parts if "functionCall" in part)
    texts = [
        "".join(part["text"] for part in parts if "text" in part and part.get("thought", False) is is_thought)
        for is_thought in (True, False)
    ]
    return texts[0], texts[1], calls


READERS: Final[dict[str, Callable[[list[Any]], tuple[str, str, tuple[tuple[str, Any], ...]]]]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "gemini": _gemini,
}
