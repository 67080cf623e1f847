"""`qwengyre bench elastic`: elastic, Colocate and Async with real processes on a compressed clock, beside the simulator.

Controller, gateway, scheduler, harnesses, evaluators, role switches and moves are the real ones; only engines and trainers take the time that the
workload says. The simulator gets the same draws, so what differs is what the control plane costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from qwengyre.bench.paced_run import PacedResult, PacedSettings, make_plan, run_paced
from qwengyre.bench.switches import Switch, Switches, worst_gap
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.errors import ConfigError
from qwengyre.journal import read
from qwengyre.runtime.records import ControllerRecord
from qwengyre.scheduler import events as ev
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.scheduler.scheduler import Scheduler
from qwengyre.sim.compare import splits
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import POLICY_NAMES, Pool, Setting, build
from qwengyre.sim.workload import Workload, load_workload
from qwengyre.telemetry.folder import RunFolder

MAX_LIVE: Final = 48
MAX_CPU_SHARE: Final = 0.5
SMALL: Final = Workload(
    steps=6,
    groups_per_step=4,
    executions_per_group=8,
    steps_per_burst=2,
    dispatch_depth=0.5,
    nodes=8,
    cell_nodes=1,
    slots_per_node=6,
    median_h=1.0,
    sigma_query=0.15,
    sigma_execution=0.3,
    overall_timeout_h=24,
    train_node_hours_per_step=1.9,
    train_share_by_duration=0.5,
    micro_steps_per_group=8,
    optimizer_s=40,
    publish_s=60,
    to_training_s=60,
    to_rollout_s=40,
    move_stall_s=0,
)
"""8 cells, 48 live executions: what two cores carry."""


class PolicyRun(msgspec.Struct, frozen=True):
    """One policy, measured and simulated on the same draws. Hours are the workload's."""

    policy: str
    paced_hours: float
    simulated_hours: float
    switches_per_burst_paced: list[int]
    switches_per_burst_simulated: list[int]
    worst_switch_gap: float | None
    """Largest difference of a switch's time, as a share of its burst's length; over bursts with equally many switches."""
    cpu_share: float
    is_valid: bool
    """The control plane used at most half of the CPU."""
    wall_s: float

    @property
    def gap(self) -> float:
        return self.paced_hours / self.simulated_hours - 1


class ElasticReport(msgspec.Struct, frozen=True):
    workload: str
    seconds_per_hour: float
    runs: list[PolicyRun]


def elastic(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="A workload of at most 48 live executions, FILE or FILE:NAME; a small one of 8 cells by default.",
        ),
    ] = "",
    seconds_per_hour: Annotated[float, typer.Option(help="Seconds that one hour of the workload takes.")] = 12.0,
    policies: Annotated[str, typer.Option(help="Which to run, comma-separated.")] = "elastic,colocate,async",
    seed: Annotated[int, typer.Option(help="Draws of the durations.")] = 0,
    lead_s: Annotated[float, typer.Option(help="What starting and scoring one harness takes here, taken off its time.")] = 0.1,
    keep: Annotated[Path | None, typer.Option(help="Keep the run folders here.")] = None,
    json_target: JsonTarget = None,
) -> None:
    """Run elastic, Colocate and Async with real processes and emulated devices, beside the simulator."""
    name, work = load_workload(workload) if workload else ("small", SMALL)
    require_small(name, work)
    names = [policy.strip() for policy in policies.split(",")]
    if unknown := [policy for policy in names if policy not in POLICY_NAMES]:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(POLICY_NAMES)}", key="--policies")
    settings = PacedSettings(seconds_per_hour, lead_s)
    with tempfile.TemporaryDirectory(prefix="qwengyre-paced-") as temporary:
        folder = keep or Path(temporary)
        runs = [run_policy(policy, work, settings, seed, folder) for policy in names]
    report = ElasticReport(name, seconds_per_hour, runs)
    Console(stderr=True).print(_table(report))
    write_json(json_target, report)


def run_policy(policy: str, workload: Workload, settings: PacedSettings, seed: int, folder: Path) -> PolicyRun:
    """Simulate to find the policy's best split, then run that one with real processes."""
    durations = Durations.draw(workload, seed)
    candidates = [build(workload, setting) for setting in splits(workload, Setting(policy=policy))]
    config, pool = min(candidates, key=lambda built: simulate(workload, built[0], built[1], durations).end)
    simulated = simulate(workload, config, pool, durations)
    plan = make_plan(workload, durations, pool, settings)
    paced = run_paced(f"paced-{policy}", config, plan, folder / policy)
    measured = replay(paced.folder, config)
    return compare(policy, measured.scaled(3600 / settings.seconds_per_hour), simulated, paced)


def compare(policy: str, measured: Switches, simulated: Switches, paced: PacedResult) -> PolicyRun:
    return PolicyRun(
        policy=policy,
        paced_hours=measured.end / 3600,
        simulated_hours=simulated.end / 3600,
        switches_per_burst_paced=measured.per_burst(),
        switches_per_burst_simulated=simulated.per_burst(),
        worst_switch_gap=worst_gap(measured, simulated),
        cpu_share=paced.cpu_share,
        is_valid=paced.cpu_share <= MAX_CPU_SHARE,
        wall_s=paced.wall_s,
    )


def simulate(workload: Workload, config: SchedulerConfig, pool: Pool, durations: Durations) -> Switches:
    """Switch times and the end of a simulated run, in the workload's seconds."""
    driver = SimDriver(workload, config, pool, durations)
    watch = _Watch()
    driver.run(lambda scheduler: watch.see(scheduler, driver.now))
    return watch.switches(driver.meters.finished_at)


def replay(folder: Path, config: SchedulerConfig) -> Switches:
    """The same of a real run, in its seconds: its journal fed to the scheduler again."""
    scheduler, watch, began, ended = Scheduler(config), _Watch(), 0.0, 0.0
    for _, record in read(RunFolder(folder).controller_journal, ControllerRecord):
        if isinstance(record, ev.Event):
            scheduler.handle(record)
            began = record.at if isinstance(record, ev.RunStarted) else began
            ended = record.at
            watch.see(scheduler, record.at - began)
    return watch.switches(ended - began)


class _Watch:
    """Notes when cells leave the rollout role or come back to it, and when bursts end."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._switches: list[Switch] = []
        self._burst_starts: dict[int, float] = {0: 0.0}

    def see(self, scheduler: Scheduler, at: float) -> None:
        state = scheduler.state
        self._burst_starts.setdefault(max(0, state.version), at)
        for cell in state.cells.all:
            before, now = self._states.get(cell.cell, "rollout"), cell.state.value
            self._states[cell.cell] = now
            if before == "rollout" and now in ("draining", "to_training", "training"):
                self._switches.append(Switch(max(0, state.version), cell.cell, "leaves", at))
            elif now == "to_rollout" != before:
                self._switches.append(Switch(max(0, state.version), cell.cell, "returns", at))

    def switches(self, end: float) -> Switches:
        return Switches(tuple(self._switches), tuple(sorted(self._burst_starts.items())), end)


def require_small(name: str, workload: Workload) -> None:
    live = workload.num_cells * workload.slots(workload.cell_nodes)
    if live > MAX_LIVE:
        raise ConfigError(
            f"{live} executions would be live at once, {MAX_LIVE} is the most: lower nodes or slots_per_node", file=name
        )
    if workload.decode_share or workload.move_stall_s:
        raise ConfigError("set decode_share and move_stall_s to 0: paced executions take the time that was drawn", file=name)
    if workload.micro_steps_per_group != workload.executions_per_group:
        raise ConfigError("set micro_steps_per_group to executions_per_group: each execution is one micro-step", file=name)
    if workload.replica_overhead:
        raise ConfigError("set replica_overhead to 0: paced trainers do not know how many they are", file=name)


def _table(report: ElasticReport) -> Table:
    elastic_run = next((run for run in report.runs if run.policy == "elastic"), report.runs[0])
    table = Table(title=f"{report.workload}: 1 h = {report.seconds_per_hour:g} s", box=None, pad_edge=False)
    columns: list[tuple[str, Callable[[PolicyRun], str]]] = [
        ("policy", lambda run: run.policy),
        ("hours", lambda run: f"{run.paced_hours:.2f}"),
        ("simulated", lambda run: f"{run.simulated_hours:.2f}"),
        ("gap", lambda run: f"{run.gap:+.1%}"),
        ("ratio", lambda run: f"{run.paced_hours / elastic_run.paced_hours:.2f}"),
        ("simulated", lambda run: f"{run.simulated_hours / elastic_run.simulated_hours:.2f}"),
        ("switches per burst", lambda run: " ".join(map(str, run.switches_per_burst_paced))),
        ("simulated", lambda run: " ".join(map(str, run.switches_per_burst_simulated))),
        ("worst time gap", lambda run: "" if run.worst_switch_gap is None else f"{run.worst_switch_gap:.1%} of its burst"),
        ("CPU", lambda run: f"{run.cpu_share:.0%}" + ("" if run.is_valid else " INVALID: the control plane was the bottleneck")),
    ]
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for run in report.runs:
        table.add_row(*(show(run) for _, show in columns))
    return table
