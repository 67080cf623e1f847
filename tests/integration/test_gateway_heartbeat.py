"""How the gateway is seen to be lost: its control socket is real, its process is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.gateway.control_api import Ping
from qwengyre.rpc.heartbeat import MISSES_UNTIL_LOST
from qwengyre.rpc.server import Done, RpcServer, Service
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.gateway_process import GatewayProcess

pytestmark = pytest.mark.integration
OK, HANGS_UP, SAYS_NOTHING = "ok", "hangs up", "says nothing"
KILLED, CRASHED = -9, 1


class Child:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.exit_code = asyncio.get_running_loop().create_future()

    async def wait_exit(self) -> int:
        return await asyncio.shield(self.exit_code)

    def kill(self) -> None:
        if not self.exit_code.done():
            self.exit_code.set_result(KILLED)

    async def stop(self) -> None:
        self.exit_code.cancel()


class Gateway(GatewayProcess):
    """`answers[life]` are those to the heartbeats of that life, the last one for good; `asked[life]` counts them."""

    def __init__(self, folder: Path, heartbeat_s: float, answers: tuple[tuple[str, ...], ...]) -> None:
        config = GatewayProcessConfig(
            model="m", journal="j", secret_file="s", control_socket=str(folder / "c.sock"), harness_socket="h"
        )
        super().__init__(config, folder, folder, RuntimeConfig(heartbeat_s=heartbeat_s))
        self.answers = answers
        self.children: list[Child] = []
        self.asked: list[int] = []
        self.changed = asyncio.Condition()
        self.told: list[int] = []
        self.on_restarted = self.tell
        self.server = RpcServer(None, lambda: Service({Ping: self.answer}))

    async def _launch(self) -> None:
        self._child = Child()
        self.children.append(self._child)
        self.asked.append(0)

    async def tell(self) -> None:
        self.told.append(len(self.children))

    async def answer(self, ping: Ping) -> Done:
        life = len(self.children) - 1
        answer = self.answers[life][min(self.asked[life], len(self.answers[life]) - 1)]
        async with self.changed:
            self.asked[life] += 1
            self.changed.notify_all()
        if answer == SAYS_NOTHING:
            await asyncio.Event().wait()
        if answer == HANGS_UP:
            for peer in list(self.server.peers):
                peer.connection.close()
        return Done()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(is_so)

    async def __aenter__(self) -> Gateway:
        await self.server.listen(f"unix:{self._config.control_socket}")
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.server.close()


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why the gateway was lost, each time. Other loggers may speak at the same time."""
    return [record.reason for record in caplog.records if record.message == "gateway_lost"]


@pytest.mark.parametrize("silence", [SAYS_NOTHING, HANGS_UP])
async def test_a_gateway_that_stalls_is_killed_after_three_heartbeats_and_told_again_in_its_next_life(
    tmp_path: Path, silence, caplog
):
    async with Gateway(tmp_path, 0.05, ((silence,), (OK,))) as gateway:
        await gateway.wait_until(lambda: len(gateway.children) == 2)
        assert gateway.asked[0] == MISSES_UNTIL_LOST
        assert gateway.children[0].exit_code.result() == KILLED
        assert gateway.told == [2]
        assert reasons(caplog)[-1].startswith("it missed its heartbeats: ")


async def test_only_heartbeats_that_are_missed_in_a_row_count(tmp_path: Path):
    almost = (HANGS_UP,) * (MISSES_UNTIL_LOST - 1)

    async with Gateway(tmp_path, 0.2, ((*almost, OK, *almost, OK, HANGS_UP), (OK,))) as gateway:
        await gateway.wait_until(lambda: len(gateway.children) == 2)
        assert gateway.asked[0] == 2 * MISSES_UNTIL_LOST + MISSES_UNTIL_LOST


async def test_a_gateway_that_ends_is_started_again_before_any_heartbeat_is_due(tmp_path: Path, caplog):
    async with Gateway(tmp_path, 600.0, ((OK,), (OK,))) as gateway:
        gateway.children[0].exit_code.set_result(CRASHED)
        while not gateway.told:
            await asyncio.sleep(0)
        assert (len(gateway.children), gateway.asked) == (2, [0, 0])
        assert reasons(caplog) == ["its process ended with 1"]
