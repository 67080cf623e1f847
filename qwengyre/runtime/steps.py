"""The training half of the driver: snapshots, joins, micro-steps, the reduction, the optimizer, checkpoints, publishes.

Each method carries out one command of the scheduler on the cells and returns when the matching event may be posted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from qwengyre.cell import api
from qwengyre.core.errors import CellFailed, NonFiniteLoss, StaleRead, TrainerError, TransferError
from qwengyre.core.ids import CORE, MicroStepId
from qwengyre.core.records import MicroStep
from qwengyre.runtime.config import RuntimeConfig
from qwengyre.runtime.fleet import Fleet
from qwengyre.runtime.records import StepPoisoned
from qwengyre.scheduler import commands as cmd
from qwengyre.telemetry.folder import RunFolder, snapshot_file
from qwengyre.trainer import checkpoint
from qwengyre.trainer.records import MicroStepStats, StepStats
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.tree import ReaderTree

log = logging.getLogger(__name__)
REDUCE_TRIES = 3  # a broken connection is built again; what breaks three times is not one
READ_AGAIN_S = 0.2  # between tries of a read that may last minutes
COMPUTE_TRIES = 3  # a micro-step that takes three cells down is the cause, not the cells


class Steps:
    """Owns the snapshots that are out, the membership groups, and the micro-steps that may still be claimed."""

    def __init__(
        self,
        fleet: Fleet,
        folder: RunFolder,
        config: RuntimeConfig,
        *,
        on_poisoned: Callable[[StepPoisoned], object],
        has_trainers: bool = True,
        fanout: int = 0,
    ) -> None:
        """Without trainers, as in an evaluation, there is no step, nothing to meet for, and nothing to save or to restore.

        `fanout`: how often one holder of a snapshot sends it (`transfer/tree.py`); 0: all cells read from the core.
        """
        self._fleet, self._folder, self._config, self._fanout = fleet, folder, config, fanout
        self._on_poisoned = on_poisoned
        self._has_trainers = has_trainers
        self.micro_steps: dict[MicroStepId, MicroStep] = {}
        self.step_snapshot: Exposure | None = None
        self.published: Exposure | None = None
        self._trees: dict[bool, ReaderTree] = {}
        """Who reads the published snapshot from whom, by True, and that of the step, by False."""
        self._has_read = asyncio.Event()
        """Set, and replaced, whenever somebody has read or given up: who waits for a source looks again."""
        self._published_by: int = CORE
        self.published_version = 0
        self.checkpoint_step = -1
        self.stats: dict[int, list[MicroStepStats]] = {}
        """Of the micro-steps computed for each step so far; what a lost cell computed stays in, it cost time."""
        self.poisoned: dict[int, str] = {}
        self._regroup: asyncio.Task[None] | None = None
        self._collective = asyncio.Lock()
        """Connecting and summing never overlap: members that took them in different orders would wait for each other."""
        self._failed_with: Counter[MicroStepId] = Counter()
        """How many cells died over a micro-step."""
        self._cell_order: tuple[int, ...] = ()
        self._membership = 0
        """Of the present groups, counted up at every change."""

    # ------------------------------------------------------------------ membership

    def regroup(self, cell_order: tuple[int, ...]) -> None:
        """Build the prefix groups of `cell_order` in the background; `close_step` waits for them."""
        if self._regroup is not None:
            self._regroup.cancel()
        self._cell_order = cell_order
        if not self._has_trainers:
            return
        self._regroup = asyncio.create_task(self._connect(cell_order), name="regroup")

    async def _connect(self, cell_order: tuple[int, ...]) -> None:
        if len(cell_order) < 2:
            return
        async with self._collective:
            self._membership += 1
            store = (await self._fleet.call(cell_order[0], api.OfferStore(), api.Offered)).address
            await self._on_all(cell_order, api.ConnectMembers(self._membership, store, cell_order), api.Timed)

    async def _on_all(self, cells: Iterable[int], operation: api.Operation, expected: type) -> None:
        """One operation on several cells at once. Waits for all, then raises the first error."""
        answers = await asyncio.gather(*(self._fleet.call(cell, operation, expected) for cell in cells), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    # ------------------------------------------------------------------ a step

    async def open_step(self, step: int) -> None:
        await self._fleet.call(CORE, api.BeginStep(step, None), api.Timed)
        self.stats[step] = []
        self.poisoned.pop(step, None)
        self.step_snapshot = await self._expose(step, is_publish=False)

    async def _expose(self, version: int, *, is_publish: bool) -> Exposure:
        return (await self._fleet.call(CORE, api.ExposeSnapshot(version, is_publish), api.Exposed)).snapshot

    async def join_step(self, cell: int, step: int) -> None:
        if cell == CORE:
            return
        snapshot = self.step_snapshot
        assert snapshot is not None, "a step is opened before it is joined"

        def wanted() -> Exposure:
            if self.step_snapshot is not snapshot or CORE not in self._fleet.cells:
                raise StaleRead(f"step {step} was given up while cell {cell} joined it")
            return snapshot

        await self._read_snapshot(cell, wanted, lambda source: api.BeginStep(step, source), is_publish=False)

    async def _read_snapshot(
        self, cell: int, wanted: Callable[[], Exposure], operation: Callable[[Exposure], api.Operation], *, is_publish: bool
    ) -> dict[str, float]:
        """An operation in which `cell` reads a snapshot, asked for anew after every transfer that broke; seconds by phase.

        What the core exposed may have died with it: whoever waits for its next life is given what that exposes. The cell reads from the
        core or from a cell that serves it on, as the snapshot's tree says. Raises StaleRead of `wanted`, and CellFailed when the cell
        could not read within the deadline: it is lost then.
        """
        deadline = asyncio.get_running_loop().time() + self._config.operation_timeout_s
        while True:
            tree = self._tree_of(wanted(), is_publish)
            if (source := tree.take(cell)) is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_read.wait(), READ_AGAIN_S)
                continue
            try:
                exposure = source.exposure
                if source.serves_on:
                    ask = api.HoldSnapshot(source.exposure, is_publish)
                    exposure = (await self._fleet.call(cell, ask, api.Exposed)).snapshot
                    tree.holds(cell, exposure)
                    self._look_again()
                phases_s = (await self._fleet.call(cell, operation(exposure), api.Timed)).phases_s
                tree.has_read(cell)
                return phases_s
            except TransferError as error:
                tree.broke(cell)
                log.warning("snapshot_not_read", extra={"cell": cell, "reason": str(error)})
                if asyncio.get_running_loop().time() > deadline:
                    self._fleet.give_up(cell, f"could not read a snapshot in {self._config.operation_timeout_s:g} s: {error}")
                await asyncio.sleep(READ_AGAIN_S)
            except BaseException:
                tree.lost(cell)
                raise
            finally:
                self._look_again()

    def _tree_of(self, snapshot: Exposure, is_publish: bool) -> ReaderTree:
        """The present one of its kind, or a new one when the snapshot is another."""
        tree = self._trees.get(is_publish)
        if tree is None or tree.exposure is not snapshot:
            owner = self._published_by if is_publish else CORE
            num_readers = len(self._fleet.cells) - 1
            tree = self._trees[is_publish] = ReaderTree(snapshot, owner, fanout=self._fanout, num_readers=num_readers)
        return tree

    def _look_again(self) -> None:
        self._has_read.set()
        self._has_read = asyncio.Event()

    async def compute(self, command: cmd.Compute) -> MicroStepStats | None:
        """None when the loss was not finite: the step is poisoned, its data kept. An answer of a step that was given up counts nowhere."""
        micro_step = msgspec.structs.replace(self.micro_steps[command.micro_step], step=command.step)
        stats = self.stats[command.step]
        try:
            answer = await self._fleet.call(command.cell, api.Compute(micro_step), api.Computed, self._config.compute_timeout_s)
        except NonFiniteLoss as error:
            if self.stats.get(command.step) is stats:
                self._poison(command.step, micro_step, str(error))
            return None
        except CellFailed as error:
            self._blame(micro_step, error)
            raise
        stats.append(answer.stats)
        return answer.stats

    def _blame(self, micro_step: MicroStep, error: CellFailed) -> None:
        """A micro-step that takes one cell after the other down is at fault itself. Raises TrainerError then."""
        self._failed_with[micro_step.micro_step] += 1
        if self._failed_with[micro_step.micro_step] >= COMPUTE_TRIES:
            raise TrainerError(
                f"{micro_step.micro_step} took {COMPUTE_TRIES} cells down, the last one was cell {error.cell}: {error.reason}"
            ) from error

    def _poison(self, step: int, micro_step: MicroStep, reason: str) -> None:
        kept = self._folder.poisoned / f"{micro_step.micro_step}.msgpack"
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(msgspec.msgpack.encode(micro_step))
        self.poisoned[step] = f"{reason} (its data is kept in {kept})"
        self._on_poisoned(StepPoisoned(step, reason, str(kept)))

    async def close_step(self, step: int, members: tuple[int, ...]) -> None:
        """Sum the members' gradients at the core. Groups that broke without a loss are built again.

        Raises CellFailed when a member was lost: the scheduler has heard of it and asks again for those who are left.
        """
        for attempt in range(REDUCE_TRIES):
            try:
                if len(members) > 1:
                    await self._wait_connected()
                async with self._collective:
                    await self._on_all(members, api.Reduce(len(members)), api.Timed)
                return
            except (TrainerError, CellFailed) as error:
                log.warning("reduce_failed", extra={"step": step, "attempt": attempt, "reason": str(error)})
                await self._fleet.ping(members)
                missing = [cell for cell in members if cell not in self._fleet.cells]
                if missing:
                    others = f", and cells {missing[1:]} with it" if missing[1:] else ""
                    raise CellFailed(missing[0], f"was lost while step {step} closed{others}") from None
                self.regroup(tuple(cell for cell in self._cell_order if cell in self._fleet.cells))
        raise TrainerError(f"step {step}: the gradients of cells {members} could not be summed in {REDUCE_TRIES} tries")

    async def _wait_connected(self) -> None:
        """Until the newest groups stand; those that are given up for newer ones meanwhile do not count. Raises their error."""
        while self._regroup is not None:
            newest = self._regroup
            await asyncio.wait([newest])
            if newest is self._regroup:
                newest.result()
                return

    async def apply(self, step: int, num_executions: int) -> StepStats:
        """The optimizer's step on the core; nothing but its count for a step whose loss or gradient was not finite."""
        poisoned = self.poisoned.pop(step, "")
        answer = await self._fleet.call(CORE, api.Apply(0 if poisoned else num_executions), api.Applied)
        return msgspec.structs.replace(answer.stats, reason=poisoned) if poisoned else answer.stats

    async def checkpoint(self, step: int, journal_position: int) -> None:
        """A state after `step` steps from which the core can be restored, durable on return.

        The snapshot first: what a new life of the core finds as a checkpoint may be published without saving anything again.
        """
        if not self._has_trainers:
            return
        folder = self._folder
        await self._fleet.call(CORE, api.SaveSnapshot(str(folder.snapshots), step), api.Timed)
        operation = api.SaveCheckpoint(
            str(checkpoint.place(folder.checkpoints, step)), step, journal_position, str(folder.policy)
        )
        await self._fleet.call(CORE, operation, api.Timed)
        self.checkpoint_step = step
        checkpoint.prune(folder.checkpoints, self._config.keep_checkpoints)
        if not self._config.audit_logprobs:
            self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        """All but what a new life of the core may have to expose again: what is published, and what comes after it."""
        for snapshot in self._folder.snapshots.glob("v*.safetensors"):
            if int(snapshot.stem.removeprefix("v")) < self.published_version:
                snapshot.unlink()

    # ------------------------------------------------------------------ role switches and publishes

    async def enter_training(self, cell: int) -> dict[str, float]:
        """Seconds by phase. Raises CellFailed when a phase failed: the cell is fenced then."""
        live = self._fleet.cells.get(cell)
        if live is None:
            raise CellFailed(cell, "is lost")
        live.is_serving = False
        return (await self._fleet.call(cell, api.EnterTraining(), api.Timed)).phases_s

    async def enter_rollout(self, cell: int, version: int) -> dict[str, float]:
        """With `version`, or what was published since then (after a loss of the core these can happen in either order).

        Seconds by phase. Raises CellFailed when a phase failed: the cell is fenced then.
        """
        await self._expose_what_was_published(cell)
        assert self.published_version >= version, "cells return to what was published"
        given = version

        def wanted() -> Exposure:
            nonlocal given
            given = self.published_version
            assert self.published is not None, "the core has exposed what was published"
            return self.published

        phases_s = await self._read_snapshot(cell, wanted, lambda source: api.EnterRollout(source, given), is_publish=True)
        if live := self._fleet.cells.get(cell):
            live.is_serving = True
        if given != self.published_version:
            await self.bring_published(cell)
        return phases_s

    async def publish(self, version: int) -> None:
        """Expose `version` and bring it to every engine that serves. A cell that fails here is lost, not the publish."""
        self.published, self._published_by = await self._expose(version, is_publish=True), CORE
        self.published_version = version
        serving = [cell for cell, live in self._fleet.cells.items() if live.is_serving]
        await self._bring(serving)

    async def _bring(self, cells: Iterable[int]) -> None:
        answers = await asyncio.gather(*(self.bring_published(cell) for cell in cells), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, CellFailed):
                raise answer

    async def bring_published(self, cell: int) -> None:
        """A cell that was not there at the publish serves what is published, though that may change meanwhile."""
        if self.published_version:  # else it has started with it
            await self._expose_what_was_published(cell)
        given = -1

        def wanted() -> Exposure:
            nonlocal given
            given = self.published_version
            assert self.published is not None, "asked below"
            return self.published

        while self.published is not None and given != self.published_version:
            await self._read_snapshot(cell, wanted, lambda source: api.UpdateWeights(source, given), is_publish=True)

    async def restore_core(self) -> int:
        """Give a new life of the core its last durable state; return the steps done in it."""
        if not self._has_trainers:
            return 0
        step, directory = latest_checkpoint(self._folder.checkpoints)
        await self._fleet.call(CORE, api.LoadCheckpoint(str(directory)), api.Timed)
        self.published, self._published_by = await self._expose_file(CORE), CORE
        self.checkpoint_step = step
        return step

    async def _expose_what_was_published(self, cell: int) -> None:
        """By `cell`, when no core of this life has exposed it: it died before its first publish, or before it was restored."""
        if self.published is None:
            self.published, self._published_by = await self._expose_file(cell), cell

    async def _expose_file(self, cell: int) -> Exposure:
        """The published version out of the run folder, exposed by `cell`."""
        snapshot = snapshot_file(self._folder.snapshots, self.published_version)
        return (await self._fleet.call(cell, api.ExposeFile(str(snapshot), self.published_version), api.Exposed)).snapshot


def latest_checkpoint(folder: Path) -> tuple[int, Path]:
    """Steps done and folder of the newest complete checkpoint. Raises TrainerError when there is none."""
    found = checkpoint.checkpoints(folder)
    if not found:
        raise TrainerError(f"{folder}: no checkpoint to resume from")
    return max(found.items())
