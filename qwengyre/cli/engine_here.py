"""The embedded engine in the process of a command, for a model that nothing trains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from qwengyre.engines.config import EngineConfig
from qwengyre.engines.embedded import EmbeddedEngine
from qwengyre.transfer.carriers import open_carrier
from qwengyre.transfer.config import TransferConfig


@contextlib.asynccontextmanager
async def open_engine(model_dir: Path, config: EngineConfig) -> AsyncIterator[EmbeddedEngine]:
    """Raises ConfigError and ModelRefused for a folder whose model it cannot serve."""
    carrier = open_carrier(TransferConfig(carrier="shm"), prefix=f"qwengyre-here-{os.getpid()}", host="127.0.0.1")
    try:
        engine = EmbeddedEngine(model_dir, carrier, config)
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        carrier.close()
