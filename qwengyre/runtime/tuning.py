"""`scheduler.tune` in a run: after a step, a plan is made in a process of its own, and the scheduler hears of it.

Nothing waits for a plan. One that comes late counts from the next publish on; one that fails is said and not missed.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence

import msgspec

from qwengyre.rpc.tether import tethered
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.tuning import Evidence, Replanned, Tuner

log = logging.getLogger(__name__)
ANSWER = msgspec.msgpack.Decoder(Replanned | None)


class Tuning:
    """At most one plan is being made at a time."""

    def __init__(self, tuner: Tuner, adopt: Callable[[Replanned], None]) -> None:
        self._tuner, self._adopt = tuner, adopt
        self._planning: asyncio.Task[None] | None = None

    def see(self, event: ev.Event, commands: Sequence[cmd.Command], scheduler: Scheduler) -> None:
        """What the scheduler heard and decided. After a step, a plan is asked for if there is enough that is new."""
        self._tuner.history.see(event, commands)
        if not isinstance(event, ev.StepDone) or (self._planning is not None and not self._planning.done()):
            return
        evidence = self._tuner.evidence(scheduler.planned, scheduler.state.steps_done, event.at)
        if evidence is not None:
            self._planning = asyncio.create_task(self._plan(evidence), name="plan")

    def stop(self) -> None:
        """Give up the plan that is being made."""
        if self._planning is not None:
            self._planning.cancel()

    async def _plan(self, evidence: Evidence) -> None:
        process = await asyncio.create_subprocess_exec(*tethered("qwengyre.sim.replan", []), stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            answer, complaint = await process.communicate(msgspec.msgpack.encode(evidence))
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            log.warning("plan_failed", extra={"step": evidence.steps_done, "error": complaint.decode(errors="replace")[-2000:]})
            return
        replanned = ANSWER.decode(answer)
        if replanned is not None:
            self._adopt(replanned)
