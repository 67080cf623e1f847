"""The contract of trackers: the same names and steps in each, one run over all lives, whatever it was that ended them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import read_metrics
from qwengyre.telemetry.records import scalars
from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.tracking.api import Tracker
from qwengyre.tracking.feed import Feed
from qwengyre.tracking.pump import Pump

RUN = MadeUpRun(num_executions=48, executions_per_group=4, groups_per_step=3, num_calls=2)
"""Four steps."""


class HasGot(NamedTuple):
    """What a tracker has of a run."""

    curves: dict[str, dict[int, float]]
    """Name -> step -> value."""
    config: dict[str, object]
    table_rows: int
    """Of the executions of all steps."""
    summary: dict[str, object]


def expected_curves(folder: RunFolder) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for record in read_metrics(folder.metrics):
        step, values = scalars(record)
        for name, value in values.items():
            curves.setdefault(name, {})[int(record.at) if step is None else step] = value
    return curves


def write_run(runs: Path) -> RunFolder:
    """A finished run, with keys of a service in its environment."""
    folder = write_made_up_run(runs, RUN)
    with open(folder.config, "a") as file:
        file.write('\n[harness]\ncommand = ["agent"]\n[harness.env]\nSERVICE_KEY = "sk-very-secret"\n')
    return folder


def cut_after_step(folder: RunFolder, step: int) -> bytes:
    """Take the records after a step away, and give them: what the run will do later."""
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    last = next(
        n for n, line in enumerate(lines) if (r := msgspec.json.decode(line)).get("type") == "StepFinished" and r["step"] == step
    )
    folder.metrics.write_bytes(b"".join(lines[: last + 1]))
    return b"".join(lines[last + 1 :])


def hold_to_contract(runs: Path, make: Callable[[], Tracker], read: Callable[[RunFolder, str], HasGot], name: str) -> None:
    """`make` is one life of a tracker, `read` what is there of the run of an id once both lives are over."""
    folder, config = write_run(runs), TrackingConfig(samples=1)
    later = cut_after_step(folder, 2)
    first = Pump(name, make(), Feed(folder, config), config)
    first.send()
    assert first.sent.table_step == 2
    first._tracker.close(is_finished=False)  # the run was stopped
    with open(folder.metrics, "ab") as file:
        file.write(later)
    second = Pump(name, make(), Feed(folder, config), config)
    second.run(pause=lambda seconds: None)
    assert second.sent.run_id == first.sent.run_id and second.sent.is_finished
    got = read(folder, second.sent.run_id)
    for curve, points in expected_curves(folder).items():
        told = got.curves[curve]
        assert told.keys() == points.keys(), curve
        assert all(abs(told[step] - value) <= 1e-6 * max(1.0, abs(value)) for step, value in points.items()), curve
    assert {"costs/device_h/rollout", "costs/tokens_generated", "costs/sandbox_h"} <= got.curves.keys()
    assert any(curve.startswith("costs/idle_h/") for curve in got.curves)
    assert str(got.config["scheduler.policy"]) == "elastic"
    assert "sk-very-secret" not in str(got.config) and "harness.env.SERVICE_KEY" in got.config
    assert got.table_rows == RUN.num_executions
    assert float(got.summary["summary/steps"]) == 4  # type: ignore[arg-type]
