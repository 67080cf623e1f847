"""Trackers without their packages: a fake and TensorBoard under the contract, and what refuses, delays and dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from qwengyre.runtime.trackers import Trackers
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.tracking.api import Cell, Point, RunToTrack, SentTable
from qwengyre.tracking.feed import Feed
from qwengyre.tracking.kinds import TensorBoard
from qwengyre.tracking.prometheus import exposition, serve
from qwengyre.tracking.pump import LONGEST_PAUSE_S, Pump
from tests.contract.trackers import HasGot, cut_after_step, expected_curves, hold_to_contract, write_run


class FakeTracker:
    """Keeps what it is told in memory, for all of its lives."""

    def __init__(self, kept: dict[str, HasGot], failures: list[str] | None = None) -> None:
        self.kept, self.failures = kept, failures if failures is not None else []
        self.id = ""
        self.is_finished: bool | None = None

    def _fail(self, where: str) -> None:
        if where in self.failures:
            self.failures.remove(where)
            raise ConnectionError(f"refused at {where}")

    def open(self, run: RunToTrack, run_id: str) -> str:
        self._fail("open")
        self.id = run_id or f"run-{len(self.kept)}"
        self.kept.setdefault(self.id, HasGot({}, dict(run.config), 0, {}))
        return self.id

    def points(self, points: Sequence[Point]) -> None:
        self._fail("points")
        for point in points:
            for name, value in point.values.items():
                self.kept[self.id].curves.setdefault(name, {})[point.step] = value

    def table(self, table: SentTable) -> None:
        self._fail("table")
        self.kept[self.id] = self.kept[self.id]._replace(table_rows=self.kept[self.id].table_rows + len(table.rows))
        assert all(len(row) == len(table.columns) for row in table.rows)

    def summary(self, values: Mapping[str, Cell]) -> None:
        self._fail("summary")
        self.kept[self.id].summary.update(values)

    def checkpoint(self, step: int, folder: Path) -> None: ...

    def close(self, *, is_finished: bool) -> None:
        self.is_finished = is_finished


def test_the_fake_keeps_the_contract(tmp_path):
    kept: dict[str, HasGot] = {}
    hold_to_contract(tmp_path, lambda: FakeTracker(kept), lambda folder, run_id: kept[run_id], "fake")
    assert len(kept) == 1


def test_tensorboard_keeps_the_contract(tmp_path):
    def read(folder: RunFolder, run_id: str) -> HasGot:
        events = EventAccumulator(str(folder.tensorboard), size_guidance={TENSORS: 0})
        events.Reload()
        curves = {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
        texts = {
            tag: [one.tensor_proto.string_val[0].decode() for one in events.Tensors(tag)] for tag in events.Tags()["tensors"]
        }
        rows = {tag: [line[1:-1].split("|") for text in found for line in text.split("\n")[2:]] for tag, found in texts.items()}
        return HasGot(curves, dict(rows["config"]), len(rows["executions"]), dict(rows["summary"]))

    hold_to_contract(tmp_path, TensorBoard, read, "tensorboard")


def test_a_tracker_that_refuses_gets_everything_in_the_end(tmp_path):
    """Whatever call is refused, and however often: nothing is lost, and the pauses grow to their bound."""
    folder, config, kept = write_run(tmp_path), TrackingConfig(), {}
    tracker = FakeTracker(kept, ["open"] * 7 + ["points", "table", "summary", "points"])
    pauses: list[float] = []
    Pump("fake", tracker, Feed(folder, config), config).run(pause=pauses.append)
    assert tracker.is_finished and not tracker.failures
    assert pauses[:7] == [5.0, 10.0, 20.0, 40.0, 80.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    [got] = kept.values()
    expected = expected_curves(folder)
    assert {name: got.curves[name] for name in expected} == expected and got.table_rows == 48


def test_what_was_sent_is_known_after_a_kill_and_a_run_that_stopped_is_gone_on_with(tmp_path):
    folder, config, kept = write_run(tmp_path), TrackingConfig(), {}
    later = cut_after_step(folder, 2)
    Pump("fake", FakeTracker(kept), Feed(folder, config), config).send()  # and killed: nothing is closed
    with open(folder.metrics, "ab") as file:
        file.write(later)
    second = Pump("fake", FakeTracker(kept), Feed(folder, config), config)
    assert second.sent.num_records and second.sent.table_step == 2
    second.send()
    assert len(kept) == 1 and next(iter(kept.values())).table_rows == 48


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": ("wandb", "wandb")}, "twice"),
        ({"prometheus": "9400"}, "host:port"),
        ({"prometheus": "localhost:0"}, "host:port"),
        ({"every_s": 0.0}, "every_s must be above 0"),
        ({"samples": -1}, "samples must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        TrackingConfig(**given)


def test_prometheus_is_given_the_newest_numbers():
    text = exposition('a "run"', [Point(4, True, {"costs/device_h/lost": 0.5})], {"summary/steps": 4, "summary/note": "x"})
    server = serve("127.0.0.1:0", lambda: text)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_address[1]}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = answer.read().decode().splitlines()
    finally:
        server.shutdown()
        server.server_close()
    assert 'qwengyre_costs_device_h_lost{run="a \\"run\\""} 0.5' in lines
    assert 'qwengyre_summary_steps{run="a \\"run\\""} 4' in lines and not any("note" in line for line in lines)


DIES = "import sys\nprint('no such host', flush=True)\nsys.exit(3)\n"
HANGS = "import time\ntime.sleep(3600)\n"
ENDS = ""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (DIES, "tracker wandb ended with exit code 3: no such host. The run goes on"),
        (HANGS, "tracker wandb has not got all of the run after 0.2 s: `qwengyre track"),
        (ENDS, None),
    ],
)
async def test_a_tracker_that_dies_or_hangs_is_named_and_ended_and_the_run_goes_on(tmp_path, monkeypatch, program, said):
    (tmp_path / "stub_tracker.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = RunFolder.create(tmp_path, "run", "")
    heard: list[str] = []
    is_said = asyncio.Event()

    def say(line: str) -> None:
        heard.append(line)
        is_said.set()

    trackers = Trackers(TrackingConfig(to=("wandb",), finish_s=0.2), folder, say, "stub_tracker")
    trackers.start()
    if program == DIES:
        await is_said.wait()
    elif program == HANGS:
        while "wandb" not in trackers._running:
            await asyncio.sleep(0)
    else:
        await trackers._keeping["wandb"]
    await trackers.finish()
    assert [line for line in heard if said and line.startswith(said)] or (said is None and not heard)
    assert all(child._process.returncode is not None for child in trackers._running.values())


def test_nothing_of_a_tracker_is_imported_by_the_controller():
    assert not {"wandb", "mlflow", "trackio"} & {name for name in sys.modules if "." not in name}
