"""What every launcher must do: the local one and the fake in tests/contract, Ray's in checks/ (`make test-ray`)."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from qwengyre.cell import api
from qwengyre.cell.cell import CellSpec
from qwengyre.core.errors import CellFailed, ProcessFailed, TrainerError
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.remote import RemoteEngine
from qwengyre.launchers.api import CellLauncher, CellLife
from qwengyre.runtime.cell_client import CellClient
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trainer.config import TrainerConfig
from qwengyre.transfer.config import TransferConfig

DEADLINE_S = 60.0


def spec_in(folder: Path, *, cell: int = 0, incarnation: int = 0, has_trainer: bool = True) -> CellSpec:
    """A cell that needs no torch and comes up in a second."""
    (folder / "plan.json").write_bytes(msgspec.json.encode(PLAN))
    model = folder / "model"
    if not model.exists():
        write_byte_tokenizer(model)
    return CellSpec(
        cell=cell,
        incarnation=incarnation,
        model_dir=str(model),
        segment_prefix=f"qg-launcher-{secrets.token_hex(8)}",
        secret=b"secret",
        threads=1,
        engine=EngineConfig(engine="paced", paced_plan=str(folder / "plan.json")),
        trainer=TrainerConfig(),
        collective_timeout_s=10.0,
        has_trainer=has_trainer,
        transfer=TransferConfig(transport="tcp"),
    )


def is_running(pid: int) -> bool:
    """Stopped counts, a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait_gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while is_running(pid):
            await asyncio.sleep(0.02)


class LauncherContract:
    """What holds of the fake, too. Subclasses give `opened(folder)`, a context with a launcher, and what follows."""

    opened: Callable[[Path], AbstractAsyncContextManager[CellLauncher]]

    def strike(self, life: CellLife) -> None:
        """End it unasked, with -9."""
        raise NotImplementedError

    async def wait_gone(self, life: CellLife) -> None:
        """Until it is."""
        raise NotImplementedError

    async def test_a_launched_cell_answers_requests_for_its_incarnation_only_and_serves_calls(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("cell-1", spec_in(tmp_path, cell=1, incarnation=4))
            assert (life.address.cell, life.address.incarnation) == (1, 4)
            client = CellClient(life.address, b"secret")
            assert (await client.call(api.Health(), api.HealthReport, DEADLINE_S)).capacity.running == 0
            stale = CellClient(msgspec.structs.replace(life.address, incarnation=3), b"secret")
            with pytest.raises(CellFailed, match="a request for incarnation 3, and this process is incarnation 4"):
                await stale.call(api.Health(), api.HealthReport, DEADLINE_S)
            engine = RemoteEngine(life.address.data, secret=b"secret")
            await engine.connect()
            assert engine.capacity().running == 0
            client.close()
            stale.close()
            for opened in (engine.close, life.stop):
                await opened()

    async def test_a_standalone_engine_serves_and_refuses_to_train(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("standalone-0", spec_in(tmp_path, cell=3, has_trainer=False))
            client = CellClient(life.address, b"secret")
            with pytest.raises(TrainerError, match="a standalone engine has no trainer"):
                await client.call(api.EnterTraining(), api.Timed, DEADLINE_S)
            client.close()
            await life.stop()

    async def test_the_end_of_a_process_is_told(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("cell-0", spec_in(tmp_path))
            self.strike(life)
            assert "-9" in await asyncio.wait_for(life.wait_end(), DEADLINE_S)
            life.kill()
            await life.stop()

    async def test_kill_ends(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("cell-0", spec_in(tmp_path))
            life.kill()
            await self.wait_gone(life)
            await asyncio.wait_for(life.wait_end(), DEADLINE_S)

    async def test_what_does_not_come_up_says_why(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            spec = msgspec.structs.replace(spec_in(tmp_path), model_dir=str(tmp_path / "nowhere"))
            with pytest.raises(ProcessFailed, match=r"(?s)cell-0: ended with exit code 1.*No such file"):
                await launcher.launch("cell-0", spec)

    async def test_a_name_can_be_launched_again(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            lives: list[CellLife] = []
            for incarnation in range(2):
                lives.append(await launcher.launch("cell-0", spec_in(tmp_path, incarnation=incarnation)))
                assert lives[-1].address.incarnation == incarnation
                lives[-1].kill()
                await self.wait_gone(lives[-1])
            assert lives[0].address != lives[1].address


class ProcessLauncherContract(LauncherContract):
    """Of launchers whose cells are processes of their own."""

    program: Callable[[Path], str]
    """Source of a module with `async def open() -> CellLauncher`: for what is launched from a process that dies."""

    def strike(self, life: CellLife) -> None:
        os.kill(life.address.pid, signal.SIGKILL)

    async def wait_gone(self, life: CellLife) -> None:
        await wait_gone(life.address.pid)

    async def test_kill_ends_a_stalled_process(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("cell-0", spec_in(tmp_path))
            os.kill(life.address.pid, signal.SIGSTOP)
            life.kill()
            await wait_gone(life.address.pid)
            await asyncio.wait_for(life.wait_end(), DEADLINE_S)

    async def test_a_stalled_process_is_stopped_too(self, tmp_path: Path):
        async with self.opened(tmp_path) as launcher:
            life = await launcher.launch("cell-0", spec_in(tmp_path))
            os.kill(life.address.pid, signal.SIGSTOP)
            await life.stop()
            await wait_gone(life.address.pid)

    @pytest.mark.parametrize("is_stalled", [False, True], ids=["alive", "stalled"])
    async def test_cells_die_with_the_process_that_launched_them(self, is_stalled: bool, tmp_path: Path):
        source = self.program(tmp_path) + textwrap.dedent(f"""
            import asyncio, pathlib
            from tests.contract.launchers import spec_in
            async def main():
                launcher = await open()
                life = await launcher.launch("cell-0", spec_in(pathlib.Path({str(tmp_path)!r})))
                print(life.address.pid, flush=True)
                await asyncio.sleep(600)
            asyncio.run(main())
        """)
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as parent:
            pid = int(parent.stdout.readline())
            assert is_running(pid)
            if is_stalled:
                os.kill(pid, signal.SIGSTOP)
            parent.kill()
            await wait_gone(pid)
