"""The bench of tuned runs: what it compares is under one cap, and what is told cannot lose to what was begun with."""

from __future__ import annotations

import msgspec

from qwengyre.bench.tuning import foreseen, row, tuned_runs
from qwengyre.sim.results import Drawn, Inline
from qwengyre.sim.workload import builtin_workloads

WORKLOAD = msgspec.structs.replace(
    builtin_workloads()["tb_v1"], steps=8, groups_per_step=4, executions_per_group=4, nodes=8, train_node_hours_per_step=1.2
)


def test_tuned_runs_from_each_bad_start_beat_what_they_began_with_under_the_same_cap():
    runs = tuned_runs("small", Drawn(foreseen(WORKLOAD)), [0], Inline())
    assert [(run.steps_per_burst, run.dispatch_depth) for run in runs] == [(1, 0.0), (runs[0].max_staleness + 1, 0.0), (8, 2.0)]
    assert all(run.staleness_max <= run.max_staleness for run in runs)
    first = runs[0]
    assert first.best < first.told < first.untuned and first.tuned < first.untuned
    assert row(first).count("|") == 9
