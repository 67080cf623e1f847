"""The comparison that `qwengyre simulate` prints: each policy at its best split, beside elastic and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec

from qwengyre.scheduler.traits import TRAITS
from qwengyre.sim.results import DurationSource, Result, fastest
from qwengyre.sim.settings import OURS, POLICY_NAMES, Setting
from qwengyre.sim.workload import Workload


class Report(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    workload: str
    seeds: list[int]
    results: list[Result]


def compare(
    name: str, source: DurationSource, base: Setting, policies: Sequence[str], seeds: Sequence[int], pool: Executor
) -> Report:
    """Simulate each policy with the settings of `base`.

    Where `base` leaves training_nodes (async) or standalone_nodes (colocate-standalone) at 0, all splits in whole cells are
    simulated and the one with the best mean is reported. Raises ValueError if a setting does not fit the nodes.
    """
    results = []
    for policy in policies:
        candidates = splits(source.workload, msgspec.structs.replace(base, policy=policy))
        results.append(fastest(source, candidates, seeds, pool))
    elastic = next((result.hours for result in results if result.policy == OURS), None)
    if elastic:
        results = [msgspec.structs.replace(result, ratio_to_elastic=result.hours / elastic) for result in results]
    return Report(name, list(seeds), results)


def splits(workload: Workload, setting: Setting) -> list[Setting]:
    """The settings to search for one policy: each split in whole cells, or just the one that was asked for."""
    replace = msgspec.structs.replace
    cell_nodes = setting.cell_nodes or workload.cell_nodes
    some = range(cell_nodes, workload.nodes, cell_nodes)
    variant = setting.variant
    if not some and variant.is_split:
        raise ValueError(
            f"{setting.policy} divides the pool, but {workload.nodes} nodes are one cell: lower cell_nodes, "
            "or leave it out with --policy elastic --policy colocate"
        )
    if not TRAITS[variant.policy].switches:
        setting = replace(setting, standalone_nodes=0)
        return [setting] if setting.training_nodes else [replace(setting, training_nodes=nodes) for nodes in some]
    setting = replace(setting, training_nodes=0)
    if variant.has_standalone:
        return [setting] if setting.standalone_nodes else [replace(setting, standalone_nodes=nodes) for nodes in some]
    return [replace(setting, standalone_nodes=0) if variant.is_one_cell else setting]


def effective(workload: Workload, setting: Setting) -> dict[str, object]:
    """A setting with what it takes from the workload filled in, and without what its policy does not use."""
    used: dict[str, object] = {
        "steps_per_burst": setting.steps_per_burst or workload.steps_per_burst,
        "dispatch_depth": workload.dispatch_depth if setting.dispatch_depth is None else setting.dispatch_depth,
    }
    variant = setting.variant
    traits = TRAITS[variant.policy]
    if not variant.is_one_cell:
        used["cell_nodes"] = setting.cell_nodes or workload.cell_nodes
    if not traits.switches:
        used["training_nodes"] = setting.training_nodes
    if setting.standalone_nodes:
        used["standalone_nodes"] = setting.standalone_nodes
    if traits.leaves_one_by_one:
        used |= {"two_way": setting.two_way, "backlog": setting.backlog, "leave_only_for_work": setting.leave_only_for_work}
        used["order"] = setting.order
        used["tune"] = setting.tune
    return used


def report_json(report: Report, workload: Workload) -> bytes:
    """The JSON of docs/reading-a-simulation.md."""
    results = [{**msgspec.structs.asdict(result), "settings": effective(workload, result.settings)} for result in report.results]
    data = {"workload": report.workload, "seeds": report.seeds, "results": results}
    return msgspec.json.format(msgspec.json.encode(data), indent=1)


__all__ = ["POLICY_NAMES", "Report", "compare", "effective", "report_json", "splits"]
