"""Two cells on one device: a call moves in mid-generation, both train one step together, both serve what it published."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from checks.gpu.conftest import Note
from qwengyre.cell import api
from qwengyre.cell.cell import CellSpec
from qwengyre.engines.api import GenerateRequest, Sampling
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.remote import RemoteEngine
from qwengyre.launchers.local import LocalLauncher
from qwengyre.runtime.cell_client import CellClient
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.training import micro_step, random_execution
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import ShmTransport, cleanup

NUM_TOKENS, DEADLINE_S = 120, 300.0


class Cell:
    def __init__(self, client: CellClient, engine: RemoteEngine) -> None:
        self.client, self.engine = client, engine

    async def do(self, operation: api.Operation, expected: type[msgspec.Struct] = api.Timed) -> msgspec.Struct:
        return await self.client.call(operation, expected, DEADLINE_S)

    async def tokens(self, request: GenerateRequest) -> list[int]:
        async with aclosing(self.engine.generate(request)) as stream:
            return [token async for chunk in stream for token in chunk.token_ids]


@asynccontextmanager
async def two_cells(model_dir: Path, folder: Path, device: str, prefix: str) -> AsyncIterator[list[Cell]]:
    launcher, secret = LocalLauncher(folder, folder, DEADLINE_S), secrets.token_bytes(32)
    cells, lives = [], []
    try:
        for number in range(2):
            spec = CellSpec(
                cell=number,
                incarnation=0,
                model_dir=str(model_dir),
                segment_prefix=prefix,
                secret=secret,
                threads=1,
                engine=EngineConfig(device=device, kernels="torch"),
                trainer=trainer_config(device),
                collective_timeout_s=DEADLINE_S,
                has_trainer=True,
                transfer=TransferConfig(transport="shm"),
            )
            lives.append(await launcher.launch(f"cell-{number}", spec))
            engine = RemoteEngine(lives[-1].address.data, secret=secret, deadline_s=DEADLINE_S)
            await engine.connect()
            cells.append(Cell(CellClient(lives[-1].address, secret), engine))
        yield cells
    finally:
        for cell in cells:
            await cell.engine.close()
            cell.client.close()
        for life in lives:
            await life.stop()


def trainer_config(device: str) -> TrainerConfig:
    return TrainerConfig(learning_rate=0.01, clip_low=0.999, clip_high=1e6, device=device)


def claim(number: int) -> msgspec.Struct:
    return micro_step(f"m{number}", 0, random_execution(np.random.default_rng(number), 0, advantage=(-1.0) ** number))


def call(name: str) -> GenerateRequest:
    prompt = np.random.default_rng(1).integers(0, 60, 200).astype(np.int32)
    return GenerateRequest(name, prompt.tobytes(), Sampling(0.0, NUM_TOKENS, (), 0))


async def move_in_mid_generation(source: Cell, destination: Cell) -> tuple[list[int], int]:
    """The call's tokens, and how many of its known ones the destination computed again."""
    whole = call("moves")
    async with aclosing(source.engine.generate(whole)) as stream:
        done = list((await anext(stream)).token_ids)
        await source.engine.abort([whole.request_id])
        done += [token async for chunk in stream for token in chunk.token_ids]
    assert 0 < len(done) < NUM_TOKENS, "it was stopped in the middle"
    known = whole.token_ids + np.array(done, np.int32).tobytes()
    handle = await source.engine.export_kv(known)
    assert handle is not None
    taken = await destination.engine.import_kv(handle)
    await source.engine.release(handle.handle_id)
    rest = GenerateRequest("moved", known, Sampling(0.0, NUM_TOKENS - len(done), (), 0, len(done)))
    return done + await destination.tokens(rest), len(known) // 4 - 1 - taken


async def test_two_cells_on_one_device_move_a_call_switch_roles_and_train_one_step(
    device: torch.device, tmp_path: Path, note: Note
):
    prefix = f"qg-gpu-{secrets.token_hex(6)}"
    model_dir = write_tiny_qwen3(tmp_path / "model")
    try:
        async with two_cells(model_dir, tmp_path, device.type, prefix) as (core, satellite):
            moved, computed_again = await move_in_mid_generation(satellite, core)
            stayed = await satellite.tokens(call("stays"))
            assert (moved, computed_again) == (stayed, 0)
            phases = {"to training": (await core.do(api.EnterTraining())).phases_s}
            await satellite.do(api.EnterTraining())
            store = (await core.do(api.OfferStore(), api.Offered)).address
            connect = api.ConnectMembers(1, store, (0, 1))
            await asyncio.gather(core.do(connect), satellite.do(connect))
            await core.do(api.BeginStep(0, None))
            snapshot = (await core.do(api.ExposeSnapshot(0, is_publish=False), api.Exposed)).snapshot
            await core.do(api.Compute(claim(0)), api.Computed)
            phases["join"] = (await satellite.do(api.BeginStep(0, snapshot))).phases_s
            await satellite.do(api.Compute(claim(1)), api.Computed)
            await asyncio.gather(core.do(api.Reduce(2)), satellite.do(api.Reduce(2)))
            stats = (await core.do(api.Apply(2), api.Applied)).stats
            published = (await core.do(api.ExposeSnapshot(1, is_publish=True), api.Exposed)).snapshot
            phases["to rollout"] = (await core.do(api.EnterRollout(published, 1))).phases_s
            await satellite.do(api.EnterRollout(published, 1))
            after = [await cell.tokens(call("after")) for cell in (core, satellite)]
        alone = Trainer(model_dir, trainer_config(device.type), ShmTransport(prefix), device=device)
        alone.begin_step(0)
        for number in range(2):
            alone.compute(claim(number))
        expected = alone.apply(2)
    finally:
        cleanup(prefix)
    note(phases_s=phases)
    assert stats.applied and stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert after[0] == after[1] != stayed
