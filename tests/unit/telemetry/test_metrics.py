from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from qwengyre.core.errors import JournalCorrupt
from qwengyre.dashboard.report import report_html
from qwengyre.dashboard.series import series_of
from qwengyre.telemetry.event_file import EventFile
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics, read_metrics
from qwengyre.telemetry.records import EvaluationFinished, RolesChanged, RunBegan, WaterlevelSampled, scalars
from qwengyre.telemetry.summary import Summary
from tests.unit.dashboard.synthetic import step

BEGAN = RunBegan(at=0.0, name="quick", policy="elastic", num_cells=3, num_steps=40)
ROLE = RolesChanged(at=1.5, cell=2, role="to_training")
LEVEL = WaterlevelSampled(at=2.0, waterlevel=12, capacity=16)
EVALUATION = EvaluationFinished(at=9.0, version=4, score=0.5, greedy=0.625, num_tasks=20, num_executions=80)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "quick", "")


def write(folder: RunFolder, *records) -> None:
    with Metrics(folder) as metrics:
        for record in records:
            metrics.record(record)


def test_records_come_back_in_order_over_several_openings(folder: RunFolder):
    write(folder, BEGAN, ROLE)
    write(folder, LEVEL, EVALUATION)
    assert list(read_metrics(folder.metrics)) == [BEGAN, ROLE, LEVEL, EVALUATION]
    assert [json.loads(line)["type"] for line in folder.metrics.read_text().splitlines()][1] == "RolesChanged"


def test_a_half_written_line_is_left_out_and_then_cut(folder: RunFolder):
    write(folder, BEGAN)
    with open(folder.metrics, "ab") as file:
        file.write(b'{"type":"RolesChan')
    assert list(read_metrics(folder.metrics)) == [BEGAN]
    write(folder, ROLE)
    assert list(read_metrics(folder.metrics)) == [BEGAN, ROLE]


FILL = """
import resource, sys
from qwengyre.core.errors import JournalFull
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics
from qwengyre.telemetry.records import RolesChanged

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
metrics = Metrics(RunFolder(sys.argv[1]))
try:
    while True:
        metrics.record(RolesChanged(1.0, 0, "rollout"))
except JournalFull as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
metrics.record(RolesChanged(2.0, 0, "training"))
"""


def test_a_full_disk_leaves_whole_lines_and_says_what_to_do(folder: RunFolder):
    done = subprocess.run([sys.executable, "-c", FILL, str(folder.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "free some space" in done.stdout
    records = list(read_metrics(folder.metrics))
    assert records[-1] == RolesChanged(2.0, 0, "training")
    assert set(records[:-1]) == {RolesChanged(1.0, 0, "rollout")}


def test_a_line_that_is_no_record_is_refused(folder: RunFolder):
    folder.metrics.write_bytes(b'{"type":"Nothing"}\n')
    with pytest.raises(JournalCorrupt, match=r"byte 0: this line is not a metric .* Delete it to read the rest"):
        list(read_metrics(folder.metrics))


def test_numbers_that_are_not_finite_come_back_as_nothing(folder: RunFolder):
    poisoned = msgspec.structs.replace(step(1, 5.0), gradient_norm=math.nan, loss=math.inf)
    write(folder, poisoned)
    [found] = read_metrics(folder.metrics)
    assert found == msgspec.structs.replace(poisoned, gradient_norm=None, loss=None)
    assert "train/gradient_norm" not in scalars(poisoned)[1] and "train/entropy" in scalars(poisoned)[1]
    assert "<svg" in report_html(series_of([found], Summary(), label="a run"))


def test_a_run_without_metrics_has_none(folder: RunFolder):
    assert list(read_metrics(folder.metrics)) == []


def test_tensorboard_reads_the_event_files(folder: RunFolder):
    write(folder, BEGAN, LEVEL, EVALUATION)
    [path] = folder.tensorboard.iterdir()
    events = list(LegacyEventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    found = {value.tag: (event.step, value.simple_value) for event in events[1:] for value in event.summary.value}
    assert found == {
        "scheduler/waterlevel": (2, 12.0),
        "scheduler/capacity": (2, 16.0),
        "evaluation/score": (4, 0.5),
        "evaluation/greedy": (4, 0.625),
    }


def test_large_steps_and_long_tags_are_encoded(tmp_path: Path):
    events = EventFile(tmp_path, wall_time=1.0)
    events.add({"x" * 300: -1.5}, step=2**40, wall_time=2.0)
    events.close()
    _, event = LegacyEventFileLoader(str(events.path)).Load()
    assert (event.step, event.wall_time, event.summary.value[0].simple_value) == (2**40, 2.0, -1.5)
    assert event.summary.value[0].tag == "x" * 300


def test_writing_metrics_imports_neither_torch_nor_tensorboard():
    code = "import sys, qwengyre.telemetry.metrics; sys.exit(any(m in sys.modules for m in ('torch', 'tensorboard', 'google.protobuf')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
