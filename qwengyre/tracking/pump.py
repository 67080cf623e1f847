"""One tracker and one run folder: what was sent so far is a file, so that a tracker that ended goes on where it stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.tracking.api import Tracker
from qwengyre.tracking.feed import Feed

log = logging.getLogger(__name__)
COSTS_EVERY_S: Final = 30.0
"""Costs are added up over the whole journal: of many short steps only some get theirs."""
MAX_POINTS: Final = 500
"""Sent at once: one request of a tracker that has missed an hour stays small."""
FIRST_PAUSE_S: Final = 5.0  # doubled at each refusal
LONGEST_PAUSE_S: Final = 120.0
"""Between tries of a tracker that refuses: doubled each time, up to this."""


class Sent(msgspec.Struct):
    """What a tracker has."""

    run_id: str = ""
    num_records: int = 0
    table_step: int = 0
    """The last step whose executions were sent."""
    checkpoint: int = -1
    is_finished: bool = False

    @classmethod
    def read(cls, path: Path) -> Sent:
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.MsgspecError):
            return cls()

    def write(self, path: Path) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(self))
        beside.replace(path)


class Pump:
    """Sends what is new, in order. An error of the tracker leaves what was sent as it is: the next try sends the rest."""

    def __init__(
        self, name: str, tracker: Tracker, feed: Feed, config: TrackingConfig, clock: Callable[[], float] = time.monotonic
    ):
        self.name, self._tracker, self._feed, self._config, self._clock = name, tracker, feed, config, clock
        run = feed.run(name)
        self._path = Path(run.folder).with_suffix(".json")
        self.sent = Sent.read(self._path)
        self._run, self._is_open = run, False
        self._costs_at = -COSTS_EVERY_S

    def send(self) -> None:
        """Everything that the run folder has and the tracker has not. Raises whatever the tracker raises."""
        feed, sent = self._feed, self.sent
        feed.refresh()
        if not self._is_open:
            sent.run_id = self._tracker.open(self._run, sent.run_id)
            sent.write(self._path)
            self._is_open = True
        until, steps = feed.num_records, feed.steps(sent.num_records)
        points = feed.points(sent.num_records)
        for first in range(0, len(points), MAX_POINTS):
            self._tracker.points(points[first : first + MAX_POINTS])
        self._tables()
        now = self._clock()
        if steps and (now >= self._costs_at + COSTS_EVERY_S or feed.ended is not None):
            self._costs_at = now
            self._tracker.points([feed.costs(steps[-1])])
        if steps or feed.ended is not None:
            self._tracker.summary(feed.summary())
        if self._config.checkpoints:
            for step, folder in feed.checkpoints(sent.checkpoint).items():
                self._tracker.checkpoint(step, folder)
                sent.checkpoint = step
        sent.num_records = until
        sent.write(self._path)

    def _tables(self) -> None:
        if not self._config.executions:
            return
        for step in [step for step in self._feed.steps(0) if step > self.sent.table_step]:
            self._tracker.table(self._feed.executions(step))
            self.sent.table_step = step

    def close(self) -> None:
        """The run has ended, and all of it was sent."""
        if self._is_open:
            self._tracker.close(is_finished=self._feed.is_finished)
            self._is_open = False
        self.sent.is_finished = self._feed.is_finished
        self.sent.write(self._path)

    def run(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Until the run has ended and the tracker has it all. A tracker that refuses is tried again for as long as the process lives."""
        wait_s = FIRST_PAUSE_S
        while True:
            try:
                self.send()
                wait_s = FIRST_PAUSE_S
                if self._feed.ended is not None:
                    self.close()
                    return
            except Exception as error:  # a tracker may raise anything; it is logged and tried again
                log.warning("tracker_refused", exc_info=error, extra={"tracker": self.name, "again_in_s": wait_s})
                pause(wait_s)
                wait_s = min(LONGEST_PAUSE_S, 2 * wait_s)
                continue
            pause(self._config.every_s)
