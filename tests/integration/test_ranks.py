"""A cell one of whose ranks is on another machine: two launchers that share nothing but the address."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.cell import api
from qwengyre.cell.ranks import api as ranks
from qwengyre.cell.ranks.trainer import RANK_LOST
from qwengyre.core.errors import CellFailed, TrainerError, Unreachable
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.model import read_weights
from qwengyre.launchers.local import LocalLauncher
from qwengyre.rpc.address import parse_address
from qwengyre.rpc.channel import Channel
from qwengyre.runtime.cell_client import CellClient
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.sockets import listening_hosts
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.tcp import TcpTransport
from tests.contract.launchers import DEADLINE_S, spec_in

pytestmark = pytest.mark.integration


async def test_a_rank_of_another_machine_holds_its_shard_and_takes_the_cell_along(tmp_path: Path):
    model = write_tiny_qwen3(tmp_path / "tiny")
    spec = msgspec.structs.replace(
        spec_in(tmp_path), model_dir=str(model), engine=EngineConfig(), trainer=TrainerConfig(ranks=2), ranks_here=1
    )
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = (LocalLauncher(tmp_path / name, tmp_path / name, DEADLINE_S) for name in ("here", "there"))

    async def join():
        while not here.ranks_file("cell-0").exists():
            await asyncio.sleep(0.02)
        at = here.ranks_file("cell-0").read_text()
        idle = socket.create_connection(parse_address(at))  # says nothing, and holds nobody up
        with pytest.raises(Unreachable):
            await asyncio.to_thread(Channel.connect, parse_address(at), b"a stranger's", DEADLINE_S)
        with pytest.raises(TrainerError, match="does not wait for a rank 7"):
            friend = await asyncio.to_thread(Channel.connect, parse_address(at), spec.secret, DEADLINE_S)
            await asyncio.to_thread(friend.call, ranks.Join(7), ranks.RankSpec)
        idle.close()
        return await there.join("cell-0", spec, [1], at)

    life, [rank] = await asyncio.gather(here.launch("cell-0", spec), join())
    for pid in (life.address.pid, rank.pid):
        assert set(listening_hosts(pid)) == {"127.0.0.1"}, "cells of the local launcher are for this machine alone"
    client = CellClient(life.address, spec.secret)
    exposure = (await client.call(api.ExposeSnapshot(1, is_publish=False), api.Exposed, DEADLINE_S)).snapshot
    transport = TcpTransport()
    shards = [transport.read(each) for each in (exposure, *exposure.others)]
    for name, array in read_weights(model).items():
        np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards]), array)
    transport.close()
    rank.kill()
    with pytest.raises(CellFailed):
        await client.call(api.BeginStep(0, snapshot=None), api.Timed, DEADLINE_S)
    assert await life.wait_end() == f"its process ended with {RANK_LOST}"
    client.close()
