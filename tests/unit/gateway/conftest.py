"""A gateway in this process, in front of a scripted engine, reached without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

from qwengyre.engines.api import Serving
from qwengyre.gateway.app import HarnessApp
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.control import Control
from qwengyre.gateway.gateway import Execution, Gateway, open_journal
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.engines import ScriptedEngine, replies
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.records import Opened

SECRET = b"s" * 32


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def rendering(model: Path) -> Rendering:
    return Rendering.from_folder(model, {"name": "qwen3", "enable_thinking": True})


class Bench:
    """One gateway and what a test drives it with."""

    def __init__(self, rendering: Rendering, folder: Path, config: GatewayConfig):
        self.rendering, self.folder = rendering, folder
        clock = itertools.count(1000)
        self.journal = open_journal(folder / "gateway.journal", config)
        self.gateway = Gateway(config, rendering, self.journal, SECRET, lambda: float(next(clock)))
        self.gateway.replay()
        self.harness_app = HarnessApp(self.gateway)
        self.stop = asyncio.Event()
        self.control = Control(self.gateway, lambda asked: ScriptedEngine())

    def ids(self, text: str) -> list[int]:
        return list(self.rendering.tokenizer.encode(text))

    def text(self, token_ids: Sequence[int]) -> str:
        return self.rendering.tokenizer.decode(token_ids)

    def says(self, *answers: str, **options: object) -> ScriptedEngine:
        """An engine whose n-th call answers `answers[n]`."""
        return ScriptedEngine(replies([self.ids(answer) for answer in answers]), max_context_tokens=100_000, **options)

    async def open(self, execution: str = "e000001-0", *, engine: Serving | None = None, **options: object) -> Execution:
        defaults = {"attempt": 0, "seed": 7, "temperature": 1.0, "trainable": True, "model": "policy"}
        limits = {"max_context_tokens": 1 << 20, "max_tokens_per_call": 1 << 20}
        opened = Opened(**{"session": -1, "execution": execution, **defaults, **limits, **options})
        live = await self.gateway.open(opened)
        if engine is not None:
            await self.gateway.set_server("cell-0", engine)
            live.route.set("cell-0")
        return live

    def http(self, execution: Execution | None = None) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {execution.keys.key}"} if execution else {}
        transport = httpx.ASGITransport(self.harness_app)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway/v1", headers=headers)

    async def ask(self, request: msgspec.Struct) -> msgspec.Struct:
        """A request of the owner, as it comes off the wire."""
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
        return await self.control.handlers()[type(request)](decoded)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        serving = asyncio.ensure_future(self.gateway.serve(self.stop))
        await asyncio.sleep(0)
        try:
            yield self
        finally:
            self.stop.set()
            await serving
            self.journal.close()


@pytest.fixture
def make_bench(rendering: Rendering, tmp_path: Path) -> Callable[[], Bench]:
    folders = (tmp_path / f"gateway-{number}" for number in itertools.count())
    return lambda: Bench(rendering, next(folders), GatewayConfig(max_context_tokens=100_000))


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()
