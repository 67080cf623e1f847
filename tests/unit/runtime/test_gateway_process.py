"""What keeps the gateway alive, without a process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qwengyre.core.errors import ProcessGaveUp
from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_process import GatewayProcess
from qwengyre.runtime.give_up import MAX_LOSSES


class FakeProcess(GatewayProcess):
    """Dies when it is told to; `lives` counts."""

    def __init__(self) -> None:
        config = GatewayProcessConfig(model="m", journal="j", secret_file="s", control_socket="c", harness_socket="h")
        super().__init__(config, Path("/nowhere"), Path("/nowhere"), RuntimeConfig())
        self.lives = 0
        self.serves = asyncio.Condition()
        self.dies = asyncio.Event()

    async def _launch(self) -> None:
        async with self.serves:
            self.lives += 1
            self.serves.notify_all()

    async def _wait_lost(self) -> str:
        await self.dies.wait()
        self.dies.clear()
        return "killed"

    async def wait_life(self, number: int) -> None:
        async with self.serves:
            await self.serves.wait_for(lambda: self.lives >= number)


async def test_a_gateway_that_dies_while_it_is_told_its_servers_again_is_started_once_more():
    """Orders to a gateway that is away are sent again until it is back: they must not keep it from coming back."""

    process = FakeProcess()
    told: list[int] = []

    async def tell() -> None:
        process.dies.set()
        await process.wait_life(3)
        told.append(process.lives)

    async def tell_again() -> None:
        told.append(process.lives)

    async def on_restarted() -> None:
        await (tell() if process.lives == 2 else tell_again())

    process.on_restarted = on_restarted
    await process.start()
    process.dies.set()
    await process.wait_life(3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == [3, 3]
    process._watch.cancel()


async def test_a_gateway_that_never_stays_ends_the_run_with_the_reason():
    process = FakeProcess()

    async def on_restarted() -> None:
        process.dies.set()

    process.on_restarted = on_restarted
    await process.start()
    process.dies.set()
    with pytest.RaisesGroup(ProcessGaveUp):
        await process.wait_failed()
    assert process.lives == MAX_LOSSES
