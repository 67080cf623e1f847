"""`qwengyre report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError
from qwengyre.telemetry.folder import RunFolder

PAGES = (".html", ".svg")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Write here: a page, or a picture if it ends in .svg.")] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Of one run: what its scheduling saved against Colocate and Async, simulated from its journal."
        ),
    ] = False,
) -> None:
    """Write report.html into the folder of one run, or compare the held-out scores of several in one page.

    With --compare the report also says how long this very run, with the same executions and steps, would have taken under the two baselines.
    """
    if out is not None and out.suffix not in PAGES:
        raise ConfigError(f"a report is a page or a picture: end its name in {' or '.join(PAGES)}", file=str(out), key="--out")
    from qwengyre.dashboard.report import write_comparison, write_picture, write_report

    folders = [RunFolder.open(run) for run in runs]
    if compare:
        if len(folders) != 1 or out is not None:
            raise ConfigError("this is for the report of one run: give one, and leave out --out", key="--compare")
        say(str(_with_baselines(folders[0])))
        return
    if len(folders) == 1 and out is None:
        path = write_report(folders[0])
    elif len(folders) == 1 and out is not None and out.suffix == ".svg":
        path = write_picture(folders[0], out)
    else:
        path = write_comparison(folders, out or Path("comparison.html"))
    say(str(path))


def _with_baselines(folder: RunFolder) -> Path:
    from qwengyre.cli.simulation import LEFT_OUT, print_table
    from qwengyre.dashboard.report import baselines_section, write_report
    from qwengyre.runtime.baselines import simulate_baselines

    found, workload = simulate_baselines(folder)
    print_table(found, workload)
    say(LEFT_OUT)
    return write_report(folder, more=[baselines_section(found, LEFT_OUT)])
