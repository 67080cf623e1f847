"""An engine whose thread dies of a bug of ours says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qwengyre.core.errors import EngineUnavailable
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.transfer.tcp import TcpTransport


async def test_an_engine_whose_thread_died_tells_its_calls_and_its_stats(tmp_path: Path):
    transport = TcpTransport()
    engine = EmbeddedEngine(write_tiny_qwen3(tmp_path), transport, EngineConfig())
    assert engine.stats().failure == ""

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    engine._core.iterate = broken
    request = GenerateRequest("a", np.arange(40, dtype=np.int32).tobytes(), Sampling(1.0, 4, (), 0))
    with pytest.raises(EngineUnavailable, match="a bug"):
        [chunk async for chunk in engine.generate(request)]
    assert "a bug" in engine.stats().failure
    await engine.close()
    transport.close()
