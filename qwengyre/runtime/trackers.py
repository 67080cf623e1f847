"""Trackers of a run: a process each, started with it, awaited for a while at its end, and never heard of in between.

They read the run folder (docs/tracking.md). None can hold up or end a run: what they do is their own, what they fail with is in their log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final

from qwengyre.rpc.logs import log_tail
from qwengyre.rpc.processes import Supervised
from qwengyre.rpc.tether import tethered
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.tracking_config import TrackingConfig

log = logging.getLogger(__name__)
MODULE: Final = "qwengyre.tracking"
"""Above this layer: started by its name alone."""
AGAIN_AFTER_S: Final = 60.0
"""A tracker that died is started again, but not over and over: importing a tracker takes seconds of a processor."""


class Trackers:
    """Of one life of the controller."""

    def __init__(self, config: TrackingConfig, folder: RunFolder, say: Callable[[str], None], module: str = MODULE) -> None:
        self._config, self._folder, self._say, self._module = config, folder, say, module
        self._names = (*config.to, *(("prometheus",) if config.prometheus else ()))
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, Supervised] = {}

    def start(self) -> None:
        for name in self._names:
            self._keeping[name] = asyncio.create_task(self._keep(name), name=f"tracker {name}")

    async def _keep(self, name: str) -> None:
        """Until the tracker has it all, or this task is cancelled."""
        while True:
            try:
                code = await self._run(name)
            except OSError as error:
                code = -1
                log.warning("tracker_not_started", extra={"tracker": name, "reason": str(error)})
            if code == 0:
                return
            last = log_tail(self._log(name)).splitlines()[-1:]
            self._say(
                f"tracker {name} ended with exit code {code}: {' '.join(last) or 'it said nothing'}. The run goes on; it is tried again"
            )
            await asyncio.sleep(AGAIN_AFTER_S)

    async def _run(self, name: str) -> int:
        with self._log(name).open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *tethered(self._module, [str(self._folder.path.absolute()), name]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        child = self._running[name] = Supervised(f"tracker-{name}", process, self._log(name))
        return await child.wait_exit()

    def _log(self, name: str) -> Path:
        return self._folder.logs / f"tracking-{name}.log"

    async def finish(self) -> None:
        """The run has ended: wait for what is left to be sent, at most `tracking.finish_s`, then end whatever still runs."""
        scraper = self._keeping.pop("prometheus", None)
        if self._keeping:
            await asyncio.wait(self._keeping.values(), timeout=self._config.finish_s)
        for name, keeping in self._keeping.items():
            if not keeping.done():
                run = shlex.quote(str(self._folder.path))
                self._say(
                    f"tracker {name} has not got all of the run after {self._config.finish_s:g} s: `qwengyre track {run}` sends the rest"
                )
        tasks = [*self._keeping.values(), *([scraper] if scraper else [])]
        for task in tasks:
            task.cancel()
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                await child.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
