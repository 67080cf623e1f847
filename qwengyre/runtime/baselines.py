"""What the scheduling of a real run saved: the same executions, steps and switches under the two baselines, on a virtual clock."""

from __future__ import annotations

from typing import Final

from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError
from qwengyre.runtime.measured import measured_source
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.sim.compare import Report, compare
from qwengyre.sim.results import Inline
from qwengyre.sim.settings import OURS, Setting
from qwengyre.sim.workload import Workload
from qwengyre.telemetry.folder import RunFolder

BASELINES: Final = ("colocate", "async")
AS_IT_WAS: Final = 0
"""The seed under which a measured run is simulated group by group, as it was."""


def simulate_baselines(folder: RunFolder) -> tuple[Report, Workload]:
    """Elastic as the run had it set, then the baselines at their best split. Raises ConfigError before any group was trained on."""
    source = measured_source(folder)
    recorded = RecordedConfig(folder.config).table("scheduler", SchedulerConfig)
    base = Setting(two_way=recorded.two_way, backlog=recorded.backlog, leave_only_for_work=recorded.leave_only_for_work)
    policies = [OURS, *(name for name in BASELINES if name != "async" or source.workload.nodes > source.workload.cell_nodes)]
    try:
        return compare(folder.path.resolve().name, source, base, policies, [AS_IT_WAS], Inline()), source.workload
    except ValueError as error:
        raise ConfigError(str(error), file=str(folder.path)) from error
