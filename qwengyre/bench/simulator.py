"""How fast the scheduler and its simulator are, and that an event costs the same whatever the number of executions."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from qwengyre.bench.measure import measure
from qwengyre.bench.output import say
from qwengyre.sim.driver import SimDriver
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload, builtin_workloads

EXECUTIONS_PER_GROUP: Final = 16
STEPS: Final = 10


def simulator(
    cells: Annotated[int, typer.Option(min=1, help="Cells of the largest run.")] = 10_000,
    executions: Annotated[int, typer.Option(min=1, help="Executions of the largest run.")] = 1_000_000,
) -> None:
    """CPU time, time per event and memory: nl122_v1 as it is, then growing pools up to the largest."""
    say(f"{'cells':>8} {'executions':>12} {'events':>10} {'CPU s':>8} {'us/event':>9} {'peak MB':>8}")
    workload = builtin_workloads()["nl122_v1"]
    _run(workload, f"{workload.num_cells:>8,}")
    for divisor in (100, 10, 1):
        if executions // divisor >= EXECUTIONS_PER_GROUP * STEPS and cells // divisor >= 2:
            _run(grown(cells // divisor, executions // divisor), f"{cells // divisor:>8,}")


def grown(num_cells: int, num_executions: int) -> Workload:
    """A workload of nl122_v1's durations on a pool that just holds what is dispatched."""
    groups_per_step = max(1, num_executions // (EXECUTIONS_PER_GROUP * STEPS))
    return Workload(
        steps=STEPS,
        groups_per_step=groups_per_step,
        executions_per_group=EXECUTIONS_PER_GROUP,
        steps_per_burst=2,
        dispatch_depth=0.5,
        nodes=num_cells * 4,
        cell_nodes=4,
        slots_per_node=2.6 * groups_per_step * EXECUTIONS_PER_GROUP / (num_cells * 4),
        median_h=1.85,
        sigma_query=0.1,
        sigma_execution=0.257,
        overall_timeout_h=6,
        train_node_hours_per_step=2.88 * groups_per_step,
        train_share_by_duration=0.5,
        micro_steps_per_group=8,
    )


def _run(workload: Workload, label: str) -> None:
    config, pool = build(workload, Setting())
    driver = SimDriver(workload, config, pool, Durations.draw(workload, 0))
    cost = measure(driver.run)
    num_executions = workload.num_groups * workload.executions_per_group
    per_event = cost.cpu_s / driver.num_events * 1e6
    say(f"{label} {num_executions:>12,} {driver.num_events:>10,} {cost.cpu_s:>8.2f} {per_event:>9.1f} {cost.peak_mb:>8.0f}")
