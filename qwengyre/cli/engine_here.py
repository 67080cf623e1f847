"""The embedded engine in the process of a command, for a model that nothing trains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.transports import open_transport


@contextlib.asynccontextmanager
async def open_engine(model_dir: Path, config: EngineConfig) -> AsyncIterator[EmbeddedEngine]:
    """Raises ConfigError and ModelRefused for a folder whose model it cannot serve."""
    transport = open_transport(TransferConfig(transport="shm"), prefix=f"qwengyre-here-{os.getpid()}", host="127.0.0.1")
    try:
        engine = EmbeddedEngine(model_dir, transport, config)
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        transport.close()
