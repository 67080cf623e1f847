"""`qwengyre plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.sources import RunOption, WorkloadArgument
from qwengyre.core.errors import ConfigError


def plan(
    workload: WorkloadArgument = None,
    run: RunOption = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            help="No group may be staler than this, in steps. Default: the maximum that the workload's own setting shows."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 5 is 0 to 4; 7,8,9 are these.")] = "5",
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the workload, as in --set nodes=64.")
    ] = None,
    html: Annotated[Path, typer.Option(help="Where to write the picture: time against mean staleness.")] = Path("plan.html"),
    json: Annotated[
        Path | None, typer.Option(help="Write everything that was found as JSON; - is the standard output, alone.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes to simulate on.")] = 2,
) -> None:
    """Find the cells, mu, phi, standalone nodes and switches that make a workload fastest under a cap on staleness.

    Prints the best few with their spread over seeds, the Pareto front of time against mean staleness, and the TOML to paste
    into a run file.
    """
    from qwengyre.cli.output import say, write_text
    from qwengyre.cli.simulation import LEFT_OUT, print_plan, read_seeds, read_source
    from qwengyre.dashboard.simulation_page import plan_page
    from qwengyre.sim.planner import plan as search
    from qwengyre.sim.results import workers

    name, source = read_source(workload, run, override or [])
    with workers(jobs) as pool:
        try:
            found = search(source, read_seeds(seeds), pool, max_staleness=max_staleness)
        except ValueError as error:
            raise ConfigError(str(error), key=name) from error
    if json:
        import msgspec

        write_text(json, msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    if str(json) != "-":
        if run:
            say(LEFT_OUT)
        print_plan(name, found, source.workload)
        write_text(html, plan_page(name, found, source.workload))
