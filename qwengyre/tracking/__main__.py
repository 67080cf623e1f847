"""`python -m qwengyre.tracking RUN TRACKER`: one tracker of a run, or `prometheus`, in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from qwengyre.config.recorded import RecordedConfig
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.log_lines import log_to
from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.tracking.api import Point
from qwengyre.tracking.feed import Feed
from qwengyre.tracking.kinds import KINDS
from qwengyre.tracking.prometheus import exposition, serve
from qwengyre.tracking.pump import Pump

NICENESS: Final = 10
"""Of a process that the run must not feel."""


def main(run: str, name: str) -> None:
    log_to(None)
    os.nice(NICENESS)
    folder = RunFolder.open(run)
    config = RecordedConfig(folder.config).table("tracking", TrackingConfig)
    feed = Feed(folder, config)
    if name == "prometheus":
        scraped(feed, folder, config)
    else:
        Pump(name, KINDS[name](), feed, config).run()


def scraped(feed: Feed, folder: RunFolder, config: TrackingConfig) -> None:
    """Until the controller ends, and this process with it."""
    newest: dict[str, Point] = {}
    seen = 0
    text = ""
    serve(config.prometheus, lambda: text)
    while True:
        feed.refresh()
        for point in feed.points(seen):
            newest["|".join(point.values)] = point
        if steps := feed.steps(seen):
            newest["costs"] = feed.costs(steps[-1])
        seen = feed.num_records
        text = exposition(Path(folder.path).resolve().name, list(newest.values()), feed.summary())
        time.sleep(config.every_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
