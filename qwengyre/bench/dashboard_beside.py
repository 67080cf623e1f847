"""`qwengyre bench dashboard-beside`: what an open page of the dashboard costs the run that it shows.

The same paced run, with real processes and emulated devices, with a page open and without, in turn.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final

import httpx
import msgspec
import typer

from qwengyre.bench.dashboard import shown
from qwengyre.bench.elastic import SMALL, replay, simulate
from qwengyre.bench.output import say
from qwengyre.bench.paced_run import PacedSettings, make_plan, run_paced
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.errors import QwenGyreError
from qwengyre.dashboard.run_pages import LIVE_S
from qwengyre.sim.compare import splits
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Setting, build

PATHS: Final = ("", "executions?sort=reward", "tasks")
"""Pages that are looked at, all three at each look: more than one browser shows."""
LEAD_S: Final = 0.1
"""What starting and scoring one harness takes, as `bench elastic` has it."""
FOUND_AGAIN_S: Final = 0.05
"""Between two looks for the run's folder, which the run makes at its start."""


class Beside(msgspec.Struct, frozen=True):
    """Medians over the rounds. Ratios are of a round with the page open to the round without it that was next to it."""

    rounds: int
    training_s: float
    """From the start of the run to its end by its own journal, without a page."""
    training_ratio: float
    cpu_s: float
    """Processor time of all processes of the run, without a page: controller, gateway, cells, harnesses."""
    cpu_ratio: float
    looks: int
    """Of each round with an open page."""
    training_ratios: tuple[float, ...]
    cpu_ratios: tuple[float, ...]


class OpenPage:
    """A browser's page, or rather three, that look at the one run of a folder until left. `looks` counts them."""

    def __init__(self, runs_dir: Path) -> None:
        self.looks = 0
        self._runs_dir = runs_dir
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._failed: Exception | None = None

    def __enter__(self) -> OpenPage:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()
        if self._failed is not None and error is None:
            raise QwenGyreError(f"the page could not be read: {self._failed}") from self._failed

    def _look(self) -> None:
        while not any(self._runs_dir.glob("*/config.toml")):
            if self._left.wait(FOUND_AGAIN_S):
                return
        (config,) = self._runs_dir.glob("*/config.toml")
        try:
            with shown(self._runs_dir) as (client, _):
                tags: dict[str, str] = {}
                while not self._left.wait(LIVE_S):
                    for path in PATHS:
                        self._get(client, f"/run/{config.parent.name}/{path}", tags)
                    self.looks += 1
        except (httpx.HTTPError, QwenGyreError) as error:
            self._failed = error

    def _get(self, client: httpx.Client, path: str, tags: dict[str, str]) -> None:
        response = client.get(path, headers={"if-none-match": tags.get(path, "")})
        if response.status_code != httpx.codes.NOT_MODIFIED:
            response.raise_for_status()
        tags[path] = response.headers.get("etag", "")


def dashboard_beside(
    rounds: Annotated[int, typer.Option(min=1, help="Runs with a page open, and as many without.")] = 3,
    seconds_per_hour: Annotated[float, typer.Option(help="Seconds that one hour of the workload takes.")] = 12.0,
    json_target: JsonTarget = None,
) -> None:
    """Train with a page of the dashboard open and without, in turn: time of training and processor time of the run."""
    durations = Durations.draw(SMALL, 0)
    candidates = [build(SMALL, setting) for setting in splits(SMALL, Setting(policy="elastic"))]
    config, pool = min(candidates, key=lambda built: simulate(SMALL, built[0], built[1], durations).end)
    plan = make_plan(SMALL, durations, pool, PacedSettings(seconds_per_hour, LEAD_S))
    training: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    looks: list[int] = []
    with tempfile.TemporaryDirectory(prefix="qwengyre-beside-") as scratch:

        def measured(name: str, page: OpenPage | None) -> tuple[float, float]:
            with page or nullcontext():
                run = run_paced(name, config, plan, Path(scratch) / name)
            cpu_s = run.cpu_share * run.wall_s * (os.cpu_count() or 1)
            training_s = replay(run.folder, config).end
            say(f"{name:<12}{training_s:>9.2f} s of training{cpu_s:>9.2f} s of processors")
            return training_s, cpu_s

        for number in range(rounds):
            pair: dict[bool, tuple[float, float]] = {}
            for is_open in (number % 2 == 0, number % 2 == 1):
                name = f"{'open' if is_open else 'alone'}-{number}"
                page = OpenPage(Path(scratch) / name / "runs") if is_open else None
                pair[is_open] = measured(name, page)
                looks += [page.looks] if page is not None else []
            training.append((pair[True][0], pair[False][0]))
            cpu.append((pair[True][1], pair[False][1]))
    training_ratios, cpu_ratios = _ratios(training), _ratios(cpu)
    figures = Beside(
        rounds=rounds,
        training_s=statistics.median(alone for _, alone in training),
        training_ratio=statistics.median(training_ratios),
        cpu_s=statistics.median(alone for _, alone in cpu),
        cpu_ratio=statistics.median(cpu_ratios),
        looks=min(looks),
        training_ratios=training_ratios,
        cpu_ratios=cpu_ratios,
    )
    say(f"with an open page, {figures.looks} looks or more, to without one, by round and in the middle:")
    say(f"training {_shown(figures.training_ratios)}; {figures.training_ratio:.4f}")
    say(f"processors {_shown(figures.cpu_ratios)}; {figures.cpu_ratio:.4f}")
    write_json(json_target, figures)


def _ratios(pairs: list[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(with_page / alone for with_page, alone in pairs)


def _shown(ratios: tuple[float, ...]) -> str:
    return " ".join(f"{ratio:.4f}" for ratio in ratios)
