"""The Ray launcher: the contract of launchers, three nodes of which one is killed in mid-run, and a whole run. `make test-ray`.

Nodes are simulated on this machine by `ray.cluster_utils`: real raylets, one GCS, no network between them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import get_placement_group, remove_placement_group

from qwengyre.core.errors import ConfigError, NoRoom, ProcessFailed
from qwengyre.doctor.cluster import examine_cluster
from qwengyre.launchers.config import RayConfig, Reservation
from qwengyre.launchers.on_ray import RayLauncher
from qwengyre.telemetry.records import RolesChanged, RunBegan, StepFinished
from tests.contract.launchers import DEADLINE_S, ProcessLauncherContract, spec_in, wait_gone
from tests.integration.run_kit import RunKit, executions_done, metrics, summary

NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head for the driver, without room for cells, and three nodes for a cell each."""
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    for _ in range(3):
        made.add_node(**NODE)
    made.wait_for_nodes()
    yield made
    if ray.is_initialized():
        ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="class")
def one_node(request: pytest.FixtureRequest) -> Iterator[None]:
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 4})
    made.wait_for_nodes()
    request.cls.address = made.address
    yield
    made.shutdown()


@pytest.mark.usefixtures("one_node")
class TestRayLauncher(ProcessLauncherContract):
    address: str

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[RayLauncher]:
        launcher = await RayLauncher(RayConfig(address=self.address), folder, DEADLINE_S).open()
        yield launcher
        await launcher.close()

    def program(self, folder: Path) -> str:
        return f"""
import pathlib
from qwengyre.launchers.config import RayConfig
from qwengyre.launchers.on_ray import RayLauncher
async def open():
    return await RayLauncher(RayConfig(address={self.address!r}), pathlib.Path({str(folder)!r}), {DEADLINE_S}).open()
"""


def test_a_node_that_dies_is_told_and_its_cell_finds_room_elsewhere(cluster: Cluster, tmp_path: Path):
    async def main() -> None:
        launcher = await RayLauncher(RayConfig(address=cluster.address), tmp_path, 10.0).open()
        lives = [await launcher.launch(f"cell-{cell}", spec_in(tmp_path, cell=cell)) for cell in range(3)]
        assert len({life.nodes[0] for life in lives}) == 3
        victim = next(node for node in cluster.worker_nodes if node.node_id == lives[1].nodes[0])
        cluster.remove_node(victim, allow_graceful=False)
        assert "Ray lost it" in await asyncio.wait_for(lives[1].wait_end(), DEADLINE_S)
        await wait_gone(lives[1].address.pid)
        lives[1].kill()
        with pytest.raises(NoRoom, match="cell-1: no node has 1 CPU free"):
            await launcher.launch("cell-1", spec_in(tmp_path, cell=1, incarnation=1))
        cluster.add_node(**NODE)
        life = await launcher.launch("cell-1", spec_in(tmp_path, cell=1, incarnation=1))
        assert life.nodes[0] not in {life.nodes[0] for life in lives}
        await asyncio.gather(*(life.stop() for life in (lives[0], lives[2], life)))
        await launcher.close()

    asyncio.run(main())


def test_a_room_that_no_node_has_is_named(cluster: Cluster, tmp_path: Path):
    async def main() -> None:
        config = RayConfig(address=cluster.address, cell=Reservation(resources={"trainer": 2}))
        launcher = await RayLauncher(config, tmp_path, 1.0).open()
        with pytest.raises(NoRoom, match=r"1 CPU, 2 trainer.*Nodes in all: .* 1 CPU"):
            await launcher.launch("cell-0", spec_in(tmp_path))
        await launcher.close()

    asyncio.run(main())


def test_a_place_that_goes_with_its_cluster_is_a_process_that_failed(cluster: Cluster, tmp_path: Path):
    """Ray then raises a bare Exception from the wait for the placement group."""
    spec = spec_in(tmp_path)

    def lose_place() -> None:
        remove_placement_group(get_placement_group(f"{spec.segment_prefix}-cell-0-{spec.incarnation}"))

    async def main() -> None:
        config = RayConfig(address=cluster.address, cell=Reservation(resources={"trainer": 2}))
        launcher = await RayLauncher(config, tmp_path, DEADLINE_S).open()
        asyncio.get_running_loop().call_later(1.0, lose_place)
        with pytest.raises(ProcessFailed, match=r"cell-0: Ray does not place it: .* does not exist"):
            await launcher.launch("cell-0", spec)
        await launcher.close()

    asyncio.run(main())


def test_a_cluster_that_does_not_answer_is_the_users_to_mend(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"ray\.address"):
        asyncio.run(RayLauncher(RayConfig(address="127.0.0.1:1"), tmp_path, 1.0).open())


def test_doctor_examines_every_node_and_what_is_between_them(cluster: Cluster, tmp_path: Path):
    findings = examine_cluster(cluster.address, tmp_path)
    assert [finding for finding in findings if finding.verdict == "missing"] == []
    nodes = {finding.node for finding in findings if finding.what == "cores"}
    assert len(nodes) == 4
    assert {finding.node for finding in findings if finding.what == "clock skew"} == nodes
    assert len([finding for finding in findings if finding.what.startswith("bandwidth from")]) == 4
    assert "shared folder" in {finding.what for finding in findings}


def test_a_run_over_three_nodes_goes_on_when_one_is_killed(cluster: Cluster, tmp_path: Path):
    kit = RunKit(tmp_path, steps=6, turns=4)
    process = kit.start("--set", "runtime.launcher=ray", "--set", f"ray.address={cluster.address}")
    kit.wait_until(lambda: kit.has_begun() and len(executions_done(kit.run_folder())) >= 8, process)
    before = executions_done(kit.run_folder())
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    kit.wait_until(lambda: any(r.role == "lost" for r in metrics(kit.run_folder(), RolesChanged)), process)
    cluster.add_node(**NODE)
    assert process.wait() == 0, kit.output()
    folder = kit.run_folder()
    after = executions_done(folder)
    assert {execution: after[execution] for execution in before} == before
    found = summary(folder)
    assert (found.steps, found.executions_finished) == (6, len(after))
    assert found.max_logprob_gap is not None and found.max_logprob_gap <= 1e-4
    assert len(metrics(folder, RunBegan)) == 1


def test_a_cell_of_two_ranks_on_two_nodes_trains_and_outlives_the_loss_of_one(cluster: Cluster, tmp_path: Path):
    first, *_ = cluster.worker_nodes
    cluster.remove_node(first)  # the two that are left are the cell's
    kit = RunKit(tmp_path, steps=8)
    over_nodes = ("--set", "scheduler.num_cells=1", "--set", "trainer.ranks=2", "--set", "ray.ranks_per_node=1")
    process = kit.start("--set", "runtime.launcher=ray", "--set", f"ray.address={cluster.address}", *over_nodes)
    kit.wait_until(lambda: kit.has_begun() and bool(metrics(kit.run_folder(), StepFinished)), process)
    before = executions_done(kit.run_folder())
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(**NODE)
    assert process.wait() == 0, kit.output()
    folder = kit.run_folder()
    assert any(record.role == "lost" for record in metrics(folder, RolesChanged)), "the node that died was none of the cell's"
    after = executions_done(folder)
    assert {execution: after[execution] for execution in before} == before
    assert summary(folder).max_logprob_gap <= 1e-4
    assert [step.step for step in metrics(folder, StepFinished)][-1] == 8


def test_a_run_makes_its_own_cluster_with_a_standalone_engine(tmp_path: Path):
    kit = RunKit(tmp_path, steps=2)
    room = ["--set", "ray.cell.cpus=0.5", "--set", "ray.standalone.cpus=0.25"]
    folder = kit.run("--set", "runtime.launcher=ray", "--set", "scheduler.num_standalone=1", *room)
    found = summary(folder)
    assert found.steps == 2 and found.max_logprob_gap <= 1e-4
    assert (folder.logs / "standalone-0.log").exists()
