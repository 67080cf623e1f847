"""`qwengyre doctor`: what this machine or a cluster offers, what is missing and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwengyre.cli.json_output import STDOUT, JsonTarget, write_json
from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError
from qwengyre.doctor.finding import Finding, examine

COLORS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "missing": typer.colors.RED}


def doctor(
    cluster: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A Ray cluster: `auto` for the one this machine belongs to, or HOST:PORT.")
    ] = "",
    shared: Annotated[Path, typer.Option(help="With --cluster: a folder that all nodes should see.")] = Path("."),
    json: JsonTarget = None,
) -> None:
    """Check a machine, or every node of a cluster, before a run; exit code 2 when something that is needed is missing."""
    findings = _of_cluster(cluster, shared) if cluster else _of_this_machine()
    if json != STDOUT:
        show(findings)
    write_json(json, findings)
    missing = [
        f"{finding.what} ({finding.node})" if finding.node else finding.what
        for finding in findings
        if finding.verdict == "missing"
    ]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")


def _of_this_machine() -> list[Finding]:
    from qwengyre.doctor import machine, transfers

    return examine((*machine.EXAMINATIONS, *transfers.EXAMINATIONS))


def _of_cluster(address: str, shared: Path) -> list[Finding]:
    from qwengyre.doctor.cluster import examine_cluster

    return examine_cluster(address, shared)


def show(findings: list[Finding]) -> None:
    width = max(len(finding.what) for finding in findings)
    for node in dict.fromkeys(finding.node for finding in findings):
        if node:
            say(f"\n{node}", bold=True)
        for finding in (finding for finding in findings if finding.node == node):
            verdict = typer.style(f"{finding.verdict:<8}", fg=COLORS[finding.verdict], bold=True)
            say(f"{finding.what:<{width}}  {finding.found}", lead=verdict)
            if finding.todo:
                say(f"{'':8}{'':{width}}  {finding.todo}")
