"""The training half of the driver on cells that are fakes: what it does when cells die, groups break and publishes cross."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from qwengyre.cell import api
from qwengyre.core.errors import CellFailed, MembershipBroken, NonFiniteLoss, StaleRead, TrainerError, TransferError
from qwengyre.core.records import MicroStep
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.records import StepPoisoned
from qwengyre.runtime.steps import COMPUTE_TRIES, REDUCE_TRIES, Steps
from qwengyre.scheduler import commands as cmd
from qwengyre.telemetry.folder import RunFolder
from qwengyre.testing.runtime import FakeFleet
from qwengyre.transfer.api import Exposure

BROKEN = MembershipBroken(rank=0, membership=1, num_members=2, reason="late")


def exposure(version: int) -> Exposure:
    return Exposure("shm", f"weights-{version}", (), version, 0, 0)


@pytest.fixture
def poisoned() -> list[StepPoisoned]:
    """What was told of steps that were poisoned."""
    return []


@pytest.fixture
def steps(tmp_path, poisoned):
    def make(num_cells: int = 3, fanout: int = 0, **runtime: object) -> tuple[Steps, FakeFleet]:
        fleet = FakeFleet(num_cells)
        config = RuntimeConfig(**{"operation_timeout_s": 60.0, **runtime})
        return Steps(fleet, RunFolder(tmp_path), config, on_poisoned=poisoned.append, fanout=fanout), fleet

    return make


class TestCloseStep:
    async def test_sums_over_all_members_once_their_groups_stand(self, steps):
        made, fleet = steps()
        made.regroup((0, 1, 2))
        await made.close_step(4, (0, 1))
        assert fleet.told(api.ConnectMembers) == [0, 1, 2]
        assert {op.store for _, op in fleet.calls if isinstance(op, api.ConnectMembers)} == {"10.0.0.0:7"}
        assert fleet.told(api.Reduce) == [0, 1]

    async def test_groups_that_broke_are_built_again(self, steps):
        made, fleet = steps()
        failures = [BROKEN, BROKEN]

        async def reduce(cell, operation):
            if failures:
                raise failures.pop()
            return api.Timed()

        fleet.answers[api.Reduce] = reduce
        made.regroup((0, 1, 2))
        await made.close_step(4, (0, 1))
        memberships = [op.membership for _, op in fleet.calls if isinstance(op, api.ConnectMembers)]
        assert memberships == [1, 1, 1, 2, 2, 2]

    async def test_groups_that_never_stand_end_the_run(self, steps):
        made, fleet = steps()

        async def reduce(cell, operation):
            raise BROKEN

        fleet.answers[api.Reduce] = reduce
        made.regroup((0, 1))
        with pytest.raises(TrainerError, match=f"could not be summed in {REDUCE_TRIES} tries"):
            await made.close_step(4, (0, 1))

    async def test_lost_member_is_reported_and_not_waited_for(self, steps):
        made, fleet = steps()

        async def reduce(cell, operation):
            if cell == 1:
                raise fleet.lose(1)
            raise BROKEN

        fleet.answers[api.Reduce] = reduce
        made.regroup((0, 1, 2))
        with pytest.raises(CellFailed):
            await made.close_step(4, (0, 1))

    async def test_a_stalled_member_is_asked_for_a_sign_of_life_and_named(self, steps):
        made, fleet = steps()

        async def reduce(cell, operation):
            raise BROKEN

        fleet.answers[api.Reduce] = reduce
        fleet.silent.add(1)
        made.regroup((0, 1, 2))
        with pytest.raises(CellFailed, match="cell 1: was lost while step 4 closed"):
            await made.close_step(4, (0, 1, 2))
        assert fleet.told(api.Reduce) == [0, 1, 2]

    async def test_loss_of_a_cell_that_is_no_member_does_not_void_the_close(self, steps):
        made, fleet = steps()

        async def connect(cell, operation):
            if 2 in operation.cell_order and cell == 2:
                raise fleet.lose(2)
            return api.Timed()

        fleet.answers[api.ConnectMembers] = connect
        made.regroup((0, 1, 2))
        await made.close_step(4, (0, 1))
        assert fleet.told(api.Reduce) == [0, 1]

    async def test_new_groups_in_mid_close_are_waited_for(self, steps):
        made, fleet = steps()
        gate = asyncio.Event()

        async def connect(cell, operation):
            if operation.membership == 1:
                await gate.wait()
            return api.Timed()

        fleet.answers[api.ConnectMembers] = connect
        made.regroup((0, 1, 2))
        closing = asyncio.create_task(made.close_step(4, (0, 1)))
        await asyncio.sleep(0)
        made.regroup((0, 1))
        await closing
        assert fleet.told(api.Reduce) == [0, 1]

    async def test_connecting_and_summing_never_overlap(self, steps):
        made, fleet = steps()
        gate, connecting = asyncio.Event(), []

        async def reduce(cell, operation):
            await gate.wait()
            assert not connecting
            return api.Timed()

        async def connect(cell, operation):
            connecting.append(cell)
            return api.Timed()

        made.regroup((0, 1))
        await made._wait_connected()
        fleet.answers |= {api.Reduce: reduce, api.ConnectMembers: connect}
        closing = asyncio.create_task(made.close_step(4, (0, 1)))
        while not fleet.told(api.Reduce):
            await asyncio.sleep(0)
        made.regroup((0, 1, 2))
        await asyncio.sleep(0)
        gate.set()
        await closing
        await made._wait_connected()
        assert connecting == [0, 1, 2]


def sources(fleet: FakeFleet, kind: type) -> dict[int, str]:
    """By cell, from where it last read in operations of this kind; what it held itself counts as where that came from."""
    held = {cell: op.snapshot.location for cell, op in fleet.calls if isinstance(op, api.HoldSnapshot)}
    read = {cell: op.snapshot.location for cell, op in fleet.calls if isinstance(op, kind) and op.snapshot is not None}
    return {cell: held[cell] if place == f"held by {cell}" else place for cell, place in read.items()}


class TestReadersServeOn:
    async def test_the_core_sends_a_step_s_snapshot_to_two_cells_and_these_send_it_on(self, steps):
        made, fleet = steps(12, fanout=2)
        await made.open_step(4)
        await asyncio.gather(*(made.join_step(cell, 4) for cell in range(1, 12)))
        found = Counter(sources(fleet, api.BeginStep).values())
        assert found.total() == 11 and max(found.values()) == 2
        assert found["weights-4"] == 2

    async def test_few_cells_read_from_the_core_alone(self, steps):
        made, fleet = steps(3, fanout=2)
        await made.open_step(4)
        await asyncio.gather(*(made.join_step(cell, 4) for cell in (1, 2)))
        assert fleet.told(api.HoldSnapshot) == []

    async def test_cells_whose_source_died_in_the_middle_read_elsewhere(self, steps):
        made, fleet = steps(12, fanout=2)

        async def begin(cell, operation):
            place = operation.snapshot.location if operation.snapshot else ""
            if place == "held by 1" and cell == 1:
                raise fleet.lose(1)
            if place == "held by 1":
                raise TransferError("connection refused")
            return api.Timed()

        fleet.answers[api.BeginStep] = begin
        await made.open_step(4)
        joins = await asyncio.gather(*(made.join_step(cell, 4) for cell in range(1, 12)), return_exceptions=True)
        assert [type(answer) for answer in joins] == [CellFailed] + [type(None)] * 10
        found = sources(fleet, api.BeginStep)
        assert "held by 1" not in {place for cell, place in found.items() if cell != 1}

    async def test_a_publish_travels_the_same_way_and_the_next_one_begins_anew(self, steps):
        made, fleet = steps(12, fanout=2)
        for version in (1, 2):
            fleet.calls.clear()
            await made.publish(version)
            found = Counter(sources(fleet, api.UpdateWeights).values())
            assert found.total() == 12 and max(found.values()) <= 3  # the core reads its own
            assert found[f"weights-{version}"] == 3


class TestSnapshotReads:
    async def test_a_transfer_that_breaks_is_tried_again(self, steps):
        made, fleet = steps()
        failures = [TransferError("reset"), TransferError("reset")]

        async def begin(cell, operation):
            if cell and failures:
                raise failures.pop()
            return api.Timed()

        fleet.answers[api.BeginStep] = begin
        await made.open_step(4)
        await made.join_step(1, 4)
        assert fleet.told(api.BeginStep) == [0, 1, 1, 1]

    async def test_a_join_is_given_up_once_its_step_is_opened_anew(self, steps):
        made, fleet = steps()

        async def begin(cell, operation):
            if cell == 1:
                made.step_snapshot = exposure(5)
                raise TransferError("the core is gone")
            return api.Timed()

        fleet.answers[api.BeginStep] = begin
        await made.open_step(4)
        with pytest.raises(StaleRead, match="step 4 was given up while cell 1 joined it"):
            await made.join_step(1, 4)
        assert fleet.told(api.BeginStep) == [0, 1]

    async def test_a_cell_that_cannot_read_within_the_deadline_is_lost(self, steps):
        made, fleet = steps(operation_timeout_s=1e-9)

        async def begin(cell, operation):
            if cell == 1:
                raise TransferError("no route to host")
            return api.Timed()

        fleet.answers[api.BeginStep] = begin
        await made.open_step(4)
        with pytest.raises(CellFailed, match=r"cell 1: could not read a snapshot.*no route to host"):
            await made.join_step(1, 4)
        assert sorted(fleet.cells) == [0, 2]

    async def test_a_returning_cell_reads_what_the_cores_next_life_exposes(self, steps):
        made, fleet = steps()
        await made.publish(5)

        async def enter(cell, operation):
            if operation.snapshot.location == "weights-5":
                made.published = exposure(50)
                raise TransferError("the core is gone")
            return api.Timed()

        fleet.answers[api.EnterRollout] = enter
        await made.enter_rollout(2, 5)
        assert [op.snapshot.location for _, op in fleet.calls if isinstance(op, api.EnterRollout)] == [
            "weights-5",
            "weights-50",
        ]


class TestPublish:
    async def test_reaches_serving_cells_only_and_survives_one_that_dies(self, steps):
        made, fleet = steps()
        fleet.cells[0].is_serving = False

        async def update(cell, operation):
            if cell == 1:
                raise fleet.lose(1)
            return api.Timed()

        fleet.answers[api.UpdateWeights] = update
        await made.publish(5)
        assert fleet.told(api.UpdateWeights) == [1, 2]
        assert made.published_version == 5

    async def test_cell_that_returns_across_a_publish_ends_with_the_newer_weights(self, steps):
        made, fleet = steps()
        await made.publish(5)
        fleet.cells[2].is_serving = False

        async def enter(cell, operation):
            await made.publish(6)
            return api.Timed()

        fleet.answers[api.EnterRollout] = enter
        await made.enter_rollout(2, 5)
        last = [op.version for cell, op in fleet.calls if cell == 2 and isinstance(op, api.UpdateWeights)][-1]
        assert last == 6

    async def test_cell_told_to_return_to_an_older_version_gets_what_is_published(self, steps):
        made, fleet = steps()
        await made.publish(6)
        await made.enter_rollout(2, 5)
        (entered,) = [op for _, op in fleet.calls if isinstance(op, api.EnterRollout)]
        assert entered.version == 6

    async def test_new_life_is_brought_to_what_is_published_by_then(self, steps):
        made, fleet = steps()
        await made.publish(5)
        versions = []

        async def update(cell, operation):
            versions.append(operation.version)
            made.published, made.published_version = exposure(6), 6
            return api.Timed()

        fleet.answers[api.UpdateWeights] = update
        await made.bring_published(1)
        assert versions == [5, 6]


@pytest.mark.parametrize(("version", "exposed"), [(3, [1]), (0, [])])
async def test_cell_that_is_back_before_the_core_serves_what_is_on_disk(steps, version, exposed):
    """After --resume, when the core died on its way: its engine would serve the weights that the run started from."""

    made, fleet = steps()
    made.published_version = version
    given = []

    async def expose(cell, operation):
        return api.Exposed(exposure(operation.version))

    async def update(cell, operation):
        given.append(operation.version)
        return api.Timed()

    fleet.answers.update({api.ExposeFile: expose, api.UpdateWeights: update})
    await made.bring_published(1)
    assert fleet.told(api.ExposeFile) == exposed
    assert given == ([version] if version else [])


@pytest.mark.parametrize(("is_audited", "kept"), [(True, [0, 1, 2, 3]), (False, [2, 3])])
async def test_snapshots_are_kept_for_the_audit_else_from_the_published_version_on(steps, is_audited, kept):
    made, fleet = steps(audit_logprobs=is_audited)
    folder = made._folder.snapshots
    folder.mkdir()

    async def save(cell, operation):
        (folder / f"v{operation.version:06d}.safetensors").touch()
        return api.Timed()

    fleet.answers[api.SaveSnapshot] = save
    for version in range(3):
        await made.checkpoint(version, 0)
        made.published_version = version
    await made.checkpoint(3, 0)
    assert sorted(path.name for path in folder.iterdir()) == [f"v{version:06d}.safetensors" for version in kept]


async def test_a_checkpoint_that_a_killed_core_leaves_has_its_snapshot(steps):
    """The kill may come between the checkpoint's last byte and the answer."""

    made, fleet = steps()

    async def save(cell, operation):
        assert fleet.told(api.SaveSnapshot) == [cell]
        raise CellFailed(cell, "was killed")

    fleet.answers[api.SaveCheckpoint] = save
    with pytest.raises(CellFailed):
        await made.checkpoint(12, 0)


class TestCompute:
    command = cmd.Compute(ticket=1, cell=1, step=4, micro_step="m0")

    def prepared(self, steps):
        made, fleet = steps()
        made.micro_steps["m0"] = MicroStep("m0", -1, (), 0)
        made.stats[4] = []
        return made, fleet

    async def test_loss_that_is_not_finite_poisons_the_step_and_keeps_its_data(self, steps, poisoned):
        made, fleet = self.prepared(steps)

        async def compute(cell, operation):
            raise NonFiniteLoss("tiny", execution="e000000-0", path=0, what="loss is nan")

        fleet.answers[api.Compute] = compute
        assert await made.compute(self.command) is None
        assert "loss is nan" in poisoned[0].reason
        assert poisoned[0].kept_in.endswith("m0.msgpack")

    @pytest.mark.parametrize("is_open_again", [True, False])
    async def test_answer_of_a_step_that_was_given_up_counts_nowhere(self, steps, is_open_again):
        made, fleet = self.prepared(steps)
        may_answer = asyncio.Event()
        answers = [api.Computed(None), NonFiniteLoss("tiny", execution="e000000-0", path=0, what="loss is nan")]

        async def compute(cell, operation):
            answer = answers.pop()
            await may_answer.wait()
            if isinstance(answer, Exception):
                raise answer
            return answer

        fleet.answers[api.Compute] = compute
        computing = [asyncio.create_task(made.compute(self.command)) for _ in range(2)]
        await asyncio.sleep(0)
        del made.stats[4]
        if is_open_again:
            await made.open_step(4)
        may_answer.set()
        await asyncio.gather(*computing)
        assert made.poisoned == {} and made.stats == ({4: []} if is_open_again else {})

    async def test_micro_step_that_takes_one_cell_after_the_other_down_ends_the_run(self, steps):
        made, fleet = self.prepared(steps)

        async def compute(cell, operation):
            raise CellFailed(cell, "died")

        fleet.answers[api.Compute] = compute
        for _ in range(COMPUTE_TRIES - 1):
            with pytest.raises(CellFailed):
                await made.compute(self.command)
        with pytest.raises(TrainerError, match="m0 took 3 cells down"):
            await made.compute(self.command)
