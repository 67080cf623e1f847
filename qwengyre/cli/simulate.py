"""`qwengyre simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwengyre.cli.sources import RunOption, WorkloadArgument
from qwengyre.core.errors import ConfigError
from qwengyre.sim.settings import POLICY_NAMES, Setting

if TYPE_CHECKING:
    from qwengyre.sim.compare import Report
    from qwengyre.sim.results import DurationSource


PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help=f"Policy to simulate; may be repeated. Default: all of {', '.join(POLICY_NAMES)}. Also: toggle, toggle-standalone.",
    ),
]
OrderOption = Annotated[
    str, typer.Option(help="Who starts first of a publish: dispatch, or longest-first, which needs --set foresight_error=.")
]
TrainingNodesOption = Annotated[
    int, typer.Option(min=0, help="Nodes that train under async. Default: the best split is searched.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the workload, as in --set steps=12 --set cell_nodes=8."),
]


def simulate(
    workload: WorkloadArgument = None,
    run: RunOption = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 5 is 0 to 4; 7,8,9 are these.")] = "5",
    policy: PolicyOption = None,
    override: OverrideOption = None,
    training_nodes: TrainingNodesOption = 0,
    standalone_nodes: Annotated[
        int,
        typer.Option(
            min=0, help="Nodes that only roll out, for elastic and colocate-standalone. Default: none, and the best is searched."
        ),
    ] = 0,
    two_way: Annotated[bool, typer.Option(help="Elastic gives back at a boundary only the cells that are needed.")] = False,
    backlog: Annotated[
        float, typer.Option(min=0, help="With --two-way: steps' worth of executions that may wait for a slot after a publish.")
    ] = 0.0,
    order: OrderOption = "dispatch",
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Hard cap on a group's staleness, in steps.")] = None,
    tune: Annotated[bool, typer.Option(help="Elastic plans again as it goes; needs --max-staleness.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result as JSON; - is the standard output, without the table.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the picture: hours, bounds, and the timeline of each policy.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes to simulate on.")] = 1,
) -> None:
    """How long a workload takes under elastic scheduling, Colocate and Async, and how far each is from the bound.

    The scheduler that runs the cluster runs here on a virtual clock, with the same durations for every policy.
    """
    from qwengyre.cli.output import say, write_text
    from qwengyre.cli.simulation import LEFT_OUT, print_table, read_order, read_policies, read_seeds, read_source
    from qwengyre.sim.compare import compare, report_json
    from qwengyre.sim.results import workers

    name, source = read_source(workload, run, override or [])
    base = Setting(
        training_nodes=training_nodes,
        standalone_nodes=standalone_nodes,
        two_way=two_way,
        backlog=backlog,
        order=read_order(order),
        max_staleness=max_staleness,
        tune=tune,
    )
    with workers(jobs) as pool:
        try:
            report = compare(name, source, base, read_policies(policy), read_seeds(seeds), pool)
        except ValueError as error:
            raise ConfigError(str(error), key=name) from error
    if json:
        write_text(json, report_json(report, source.workload).decode() + "\n")
    if str(json) != "-":
        print_table(report, source.workload)
        if run:
            say(LEFT_OUT)
    if html:
        _write_picture(html, report, source)


def _write_picture(html: Path, report: Report, source: DurationSource) -> None:
    """Each policy again with the first seed, recorded: hours, bounds and timelines."""
    from qwengyre.cli.output import write_text
    from qwengyre.dashboard.simulation_page import comparison_page
    from qwengyre.sim.results import SimulationJob, run_job

    timelines = [run_job(SimulationJob(source, result.settings, report.seeds[0], True)).timeline for result in report.results]
    recorded = [(result, timeline) for result, timeline in zip(report.results, timelines, strict=True) if timeline is not None]
    assert len(recorded) == len(timelines), "a job that is to be recorded has a timeline"
    write_text(html, comparison_page(report, source.workload, recorded))
