"""Tell the user when an engine stops answering, and when it answers again: meanwhile its calls are held, which looks like a hang."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from qwengyre.core.errors import EngineUnavailable
from qwengyre.engines.api import GenerateRequest, Serving, TokenChunk


class TellsOutages:
    """`engine`, with a line for `say` at the beginning and at the end of each outage, however many calls try it meanwhile."""

    def __init__(self, engine: Serving, say: Callable[[str], None], max_hold_s: float) -> None:
        self._engine, self._say, self._max_hold_s = engine, say, max_hold_s
        self._is_out = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            async for chunk in self._engine.generate(request):
                if self._is_out and chunk.finish_reason != "abort":
                    self._is_out = False
                    self._say("the engine answers again")
                yield chunk
        except EngineUnavailable as error:
            if not self._is_out:
                self._is_out = True
                self._say(f"{error}: calls are held until the engine answers again, each for at most {self._max_hold_s:g} s")
            raise
