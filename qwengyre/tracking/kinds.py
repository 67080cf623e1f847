"""The trackers of others, each behind `api.Tracker`. A package is imported only in the process of its tracker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from qwengyre.core.errors import ConfigError
from qwengyre.telemetry.event_file import EventFile
from qwengyre.tracking.api import Cell, Point, RunToTrack, SentTable, Tracker

AXES: Final = {
    "train": "train/step",
    "costs": "train/step",
    "evaluation": "evaluation/version",
    "scheduler": "seconds",
    "rates": "seconds",
}
"""Prefix of a curve -> the number that it is drawn over, for wandb."""


class TensorBoard:
    """What the run's own event file has not: configuration, costs, summary and executions, as text and curves."""

    def __init__(self) -> None:
        self._file: EventFile | None = None

    def open(self, run: RunToTrack, run_id: str) -> str:
        folder = Path(run.folder).parents[1] / "tensorboard"
        self._file = EventFile(folder, wall_time=time.time())
        if not run_id:
            self._text("config", _markdown(("key", "value"), [(key, _shown(value)) for key, value in run.config.items()]), 0)
        return run_id or run.name

    def points(self, points: Sequence[Point]) -> None:
        """The curves of metrics are there already: the run writes them itself."""
        assert self._file is not None
        for point in points:
            if own := {name: value for name, value in point.values.items() if name.startswith("costs/")}:
                self._file.add(own, step=point.step, wall_time=time.time())

    def table(self, table: SentTable) -> None:
        self._text(table.name, _markdown(table.columns, table.rows), table.step)

    def summary(self, values: Mapping[str, Cell]) -> None:
        self._text("summary", _markdown(("name", "value"), list(values.items())), int(values.get("summary/steps") or 0))

    def checkpoint(self, step: int, folder: Path) -> None:
        self._text("checkpoint", str(folder), step)

    def close(self, *, is_finished: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        assert self._file is not None
        self._file.add_text(tag, text, step=step, wall_time=time.time())


class Wandb:
    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def open(self, run: RunToTrack, run_id: str) -> str:
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            id=run_id or None,
            resume="allow",
            dir=run.folder,
            config=run.config,
            save_code=False,
        )
        for axis in dict.fromkeys(AXES.values()):
            self._run.define_metric(axis)
        for prefix, axis in AXES.items():
            self._run.define_metric(f"{prefix}/*", step_metric=axis)
        return str(self._run.id)

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            axis = AXES[next(iter(point.values)).partition("/")[0]]
            self._run.log({**point.values, axis: point.step})

    def table(self, table: SentTable) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({table.name: self._wandb.Table(columns=list(table.columns), data=rows), "train/step": table.step})

    def summary(self, values: Mapping[str, Cell]) -> None:
        self._run.summary.update(dict(values))

    def checkpoint(self, step: int, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def close(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MLflow:
    """By its client, which takes a run's id with every call: nothing global is set."""

    def __init__(self) -> None:
        from mlflow import MlflowClient, entities

        self._new_client: Any = MlflowClient
        self._entities: Any = entities
        self._client: Any = None
        self._run_id = ""

    def open(self, run: RunToTrack, run_id: str) -> str:
        uri = run.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder}/mlflow.db"
        self._client = client = self._new_client(tracking_uri=uri)
        if run_id:
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = client.create_run(self._experiment(run), run_name=run.name).info.run_id
            params = [self._entities.Param(key, _shown(value)[:MLFLOW_CHARS]) for key, value in run.config.items()]
            for first in range(0, len(params), MLFLOW_PARAMS):
                client.log_batch(run_id, params=params[first : first + MLFLOW_PARAMS])
        self._run_id = run_id
        return run_id

    def _experiment(self, run: RunToTrack) -> str:
        found = self._client.get_experiment_by_name(run.project)
        if found is not None:
            return str(found.experiment_id)
        store = None if run.uri or os.environ.get("MLFLOW_TRACKING_URI") else Path(run.folder, "artifacts").as_uri()
        return str(self._client.create_experiment(run.project, artifact_location=store))

    def points(self, points: Sequence[Point]) -> None:
        """Of two values of one name and step the later is sent: with equal times MLflow keeps both, in no order."""
        last = {(name, point.step): value for point in points for name, value in point.values.items()}
        now, metric = int(time.time() * 1000), self._entities.Metric
        metrics = [metric(name, value, now, step) for (name, step), value in last.items()]
        for first in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MLFLOW_METRICS])

    def table(self, table: SentTable) -> None:
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_text(self._run_id, json.dumps(content), f"{table.name}/step-{table.step:06d}.json")

    def summary(self, values: Mapping[str, Cell]) -> None:
        now, step, entities = int(time.time() * 1000), int(values.get("summary/steps") or 0), self._entities
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        texts = {name: value for name, value in values.items() if isinstance(value, str) and value}
        self._client.log_batch(
            self._run_id,
            metrics=[entities.Metric(name, float(value), now, step) for name, value in numbers.items()],
            tags=[entities.RunTag(name, value[:MLFLOW_CHARS]) for name, value in texts.items()],
        )

    def checkpoint(self, step: int, folder: Path) -> None:
        self._client.log_artifacts(self._run_id, str(folder), f"checkpoints/{folder.name}")

    def close(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_finished else "KILLED")


MLFLOW_PARAMS: Final = 100
MLFLOW_METRICS: Final = 1000
MLFLOW_CHARS: Final = 5000
"""What one request of MLflow takes: parameters, metrics, characters of a value (mlflow/utils/validation.py)."""


class Trackio:
    def __init__(self) -> None:
        import trackio

        self._trackio: Any = trackio

    def open(self, run: RunToTrack, run_id: str) -> str:
        """A run of trackio is known by its name, which `run_id` is."""
        self._trackio.init(project=run.project, name=run_id or run.name, config=run.config, resume="allow", embed=False)
        return run_id or run.name

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            self._trackio.log(dict(point.values), step=point.step)

    def table(self, table: SentTable) -> None:
        import pandas

        frame = pandas.DataFrame([list(row) for row in table.rows], columns=list(table.columns))
        self._trackio.log({table.name: self._trackio.Table(dataframe=frame)}, step=table.step)

    def summary(self, values: Mapping[str, Cell]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        self._trackio.log(numbers, step=int(values.get("summary/steps") or 0))

    def checkpoint(self, step: int, folder: Path) -> None:
        raise ConfigError("trackio keeps no checkpoints: leave it out of `to`, or set it to false", key="tracking.checkpoints")

    def close(self, *, is_finished: bool) -> None:
        self._trackio.finish()


KINDS: Final[dict[str, Callable[[], Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as TensorBoard's text page draws it. Cells are a policy's words: nothing in them ends a cell or a line."""

    def line(cells: Sequence[Cell]) -> str:
        return "|" + "|".join(_shown(cell).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells) + "|"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])
