"""The trackers of others, offline, held to the contract of trackers. `make test-trackers` installs them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwengyre.telemetry.folder import RunFolder
from qwengyre.tracking.api import RunToTrack
from qwengyre.tracking.kinds import MLflow, Trackio, Wandb
from tests.contract.trackers import HasGot, hold_to_contract


def test_no_tracker_has_brought_another_torch():
    import torch

    assert torch.__version__.split("+")[0] == "2.13.0"


def test_mlflow_keeps_the_contract_in_a_file(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    def read(folder: RunFolder, run_id: str) -> HasGot:
        client = MlflowClient(tracking_uri=f"sqlite:///{folder.path}/tracking/mlflow/mlflow.db")
        run = client.get_run(run_id)
        assert run.info.status == "FINISHED"
        [experiment] = [one for one in client.search_experiments() if one.name == "qwengyre"]
        assert len(client.search_runs([experiment.experiment_id])) == 1
        curves: dict[str, dict[int, float]] = {}
        for name in run.data.metrics:
            history = sorted(client.get_metric_history(run_id, name), key=lambda one: one.timestamp)
            curves[name] = {one.step: one.value for one in history}
            assert len(history) == len({(one.step, one.timestamp) for one in history}), name
        tables = sorted(Path(experiment.artifact_location.removeprefix("file://"), run_id, "artifacts", "executions").iterdir())
        rows = sum(len(json.loads(table.read_text())["data"]) for table in tables)
        return HasGot(curves, dict(run.data.params), rows, dict(run.data.metrics))

    hold_to_contract(tmp_path, MLflow, read, "mlflow")


def test_trackio_keeps_the_contract_in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    def read(folder: RunFolder, run_id: str) -> HasGot:
        assert SQLiteStorage.get_runs("qwengyre") == [run_id]
        curves: dict[str, dict[int, float]] = {}
        rows, summary = 0, {}
        for line in SQLiteStorage.get_logs("qwengyre", run_id):
            for name, value in line.items():
                if name == "executions":
                    rows += len(value["_value"])
                elif name.startswith("summary/"):
                    summary[name] = value
                elif "/" in name:
                    curves.setdefault(name, {})[line["step"]] = value
        return HasGot(curves, SQLiteStorage.get_run_config("qwengyre", run_id), rows, summary)

    hold_to_contract(tmp_path, Trackio, read, "trackio")


def logged(content: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: a header of 7 bytes, then LevelDB's log format, blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_keeps_the_contract_offline(tmp_path, monkeypatch):
    """Each life leaves a folder of its own with the id of the one run; `wandb sync` joins them."""
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    def read(folder: RunFolder, run_id: str) -> HasGot:
        curves: dict[str, dict[int, float]] = {}
        config: dict[str, object] = {}
        summary: dict[str, object] = {}
        rows = 0
        files = sorted((folder.path / "tracking" / "wandb" / "wandb").glob(f"offline-run-*-{run_id}*/*.wandb"))
        assert len(files) == 2
        for file in files:
            for data in logged(file.read_bytes()):
                record = Record()
                record.ParseFromString(data)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
                summary |= {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.summary.update}
                line = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
                axis = next((line[name] for name in ("train/step", "evaluation/version", "seconds") if name in line), None)
                rows += line["executions"]["nrows"] if "executions" in line else line.get("executions/nrows", 0)
                for name, value in line.items():
                    if isinstance(value, (int, float)) and "/" in name and axis is not None:
                        curves.setdefault(name, {})[axis] = value
        return HasGot(curves, config, rows, summary)

    hold_to_contract(tmp_path, Wandb, read, "wandb")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-4"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_mlflow_keeps_a_checkpoint_as_artifacts(tmp_path, monkeypatch, checkpoint):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow import MlflowClient

    own = tmp_path / "mlflow"
    own.mkdir()
    tracker = MLflow()
    run_id = tracker.open(RunToTrack("run", "project", str(own), {}, ""), "")
    tracker.checkpoint(4, checkpoint)
    tracker.close(is_finished=True)
    got = MlflowClient(tracking_uri=f"sqlite:///{own}/mlflow.db").download_artifacts(run_id, "checkpoints/step-4", str(tmp_path))
    assert {file.name: file.read_bytes() for file in Path(got).iterdir()} == {
        file.name: file.read_bytes() for file in checkpoint.iterdir()
    }


def test_wandb_keeps_a_checkpoint_as_an_artifact(tmp_path, monkeypatch, checkpoint):
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    tracker = Wandb()
    run_id = tracker.open(RunToTrack("run", "project", str(tmp_path), {}, ""), "")
    tracker.checkpoint(4, checkpoint)
    tracker.close(is_finished=True)
    [file] = (tmp_path / "wandb").glob(f"offline-run-*-{run_id}*/*.wandb")
    artifacts = []
    for data in logged(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for artifact in (record.artifact, record.request.log_artifact.artifact):
            if artifact.name:
                artifacts.append(artifact)
    [sent] = artifacts
    assert sent.name == f"checkpoint-{run_id}" and "step-4" in sent.aliases
    assert {entry.path for entry in sent.manifest.contents} == {"config.json", "model.safetensors"}
