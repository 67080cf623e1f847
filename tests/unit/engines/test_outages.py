"""An engine that stops answering is told once, and so is its coming back."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from qwengyre.core.errors import EngineUnavailable
from qwengyre.engines.api import GenerateRequest, Sampling, TokenChunk
from qwengyre.engines.outages import TellsOutages
from qwengyre.testing.engines import ScriptedEngine

REQUEST = GenerateRequest("r", b"\0" * 8, Sampling(temperature=1.0, max_tokens=3, stop_token_ids=(), seed=1))


class Flaky(ScriptedEngine):
    is_out = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.is_out:
            raise EngineUnavailable("it does not answer")
        async for chunk in super().generate(request):
            yield chunk


async def test_an_outage_is_told_once_and_so_is_its_end():
    said: list[str] = []
    engine = Flaky()
    telling = TellsOutages(engine, said.append, 3600.0)

    async def ask() -> int:
        return sum([len(chunk.token_ids) async for chunk in telling.generate(REQUEST)])

    assert await ask() == 3 and not said
    engine.is_out = True
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            await ask()
    [line] = said
    assert "calls are held until the engine answers again, each for at most 3600 s" in line
    engine.is_out = False
    assert await ask() == 3 and await ask() == 3
    assert said[1:] == ["the engine answers again"]
    assert telling.capacity() == engine.capacity()
