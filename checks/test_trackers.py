"""The trackers of others, offline, held to the contract of trackers. `make test-trackers` installs them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwengyre.telemetry.folder import RunFolder
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
        curves = {name: {one.step: one.value for one in client.get_metric_history(run_id, name)} for name in run.data.metrics}
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
        files = sorted((folder.path / "tracking" / "wandb" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
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
