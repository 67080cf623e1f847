"""`qwengyre doctor`: what this machine or a cluster offers, what is missing and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwengyre.cli.json_output import STDOUT, JsonTarget, write_json
from qwengyre.cli.output import say, say_progress
from qwengyre.core.errors import ConfigError
from qwengyre.doctor.finding import Finding, examine

if TYPE_CHECKING:
    from qwengyre.doctor.fit import Speeds

COLORS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "missing": typer.colors.RED}
WORDS = ("exact", "refused", "not run", "wrong")
TOLD = ("refused", "wrong")
"""Words whose reasons are printed below the table; `--json` has them all."""


def doctor(
    families: Annotated[
        list[str] | None, typer.Argument(metavar="[FAMILY]...", help="With --models: model types to try; all without one.")
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="Try tiny random models of every family: exact, refused (and why), or not run.")
    ] = False,
    cluster: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A Ray cluster: `auto` for the one this machine belongs to, or HOST:PORT.")
    ] = "",
    shared: Annotated[Path, typer.Option(help="With --cluster: a folder that all nodes should see.")] = Path("."),
    fit: Annotated[
        Path | None,
        typer.Option(metavar="RUN.toml", help="Whether this run fits a device, what moves at a switch, and how fast it may be."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --fit: override a key.")] = None,
    device_gb: Annotated[float, typer.Option(help="With --fit: memory of one device; 0: what this machine has free.")] = 0.0,
    link_gb_s: Annotated[float, typer.Option(help="With --fit: from the core to a reader of a snapshot.")] = 0.0,
    memory_gb_s: Annotated[float, typer.Option(help="With --fit: a device and its own memory.")] = 0.0,
    tflops: Annotated[float, typer.Option(help="With --fit: a device's peak in the dtype that is trained in.")] = 0.0,
    utilization: Annotated[float, typer.Option(help="With --fit: share of the peak that training reaches.")] = 0.4,
    step_tokens: Annotated[float, typer.Option(help="With --fit: distinct tokens that one step trains, for a plan.")] = 0.0,
    json: JsonTarget = None,
) -> None:
    """Check a machine, every node of a cluster, or with --fit a run, before it starts; exit code 2 when something needed is missing."""
    if models:
        _show_models(families or [], json)
        return
    if families:
        raise ConfigError("families are tried with --models", key=families[0])
    if fit is not None:
        from qwengyre.doctor.fit import Speeds

        speeds = Speeds(tflops, utilization, memory_gb_s, link_gb_s, step_tokens)
        findings = _of_run(fit, overrides or [], device_gb, speeds)
    else:
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


def _show_models(families: list[str], json: JsonTarget) -> None:
    from qwengyre.doctor.models import COLUMNS, known_families, try_families

    wanted = known_families(families)
    width, rows = max(map(len, wanted)), []
    table = json != STDOUT
    if table:
        say(_line("family", COLUMNS, width), bold=True)
    for row in try_families(wanted):
        rows.append(row)
        if table:
            say(_line(row.family, [row.cells[column].word for column in COLUMNS], width))
    if table:
        for word in WORDS:
            say(_line(word, [str(sum(row.cells[column].word == word for row in rows)) for column in COLUMNS], width), bold=True)
        for row in rows:
            for column in COLUMNS:
                if row.cells[column].word in TOLD:
                    say(f"{row.family}, {column}: {row.cells[column].reason}")
    write_json(json, rows)
    if wrong := [row.family for row in rows if any(cell.word == "wrong" for cell in row.cells.values())]:
        raise ConfigError(f"wrong: {', '.join(wrong)}. Please report it")


def _line(first: str, cells: Sequence[str], width: int) -> str:
    return f"{first:<{width}}  " + "  ".join(f"{cell:<9}" for cell in cells).rstrip()


def _of_this_machine() -> list[Finding]:
    from qwengyre.doctor import machine, transfers

    return examine((*machine.EXAMINATIONS, *transfers.EXAMINATIONS))


def _of_cluster(address: str, shared: Path) -> list[Finding]:
    from qwengyre.doctor.cluster import examine_cluster

    return examine_cluster(address, shared)


def _of_run(run_file: Path, overrides: list[str], device_gb: float, speeds: Speeds) -> list[Finding]:
    from qwengyre.doctor.fit import fit, measure_model, room_here
    from qwengyre.runtime.run_config import load_run

    config = load_run(run_file, overrides, say_progress)
    if not config.policy.model:
        raise ConfigError("a run without a model warms one up that fits every machine: name a folder", key="policy.model")
    model = measure_model(Path(config.policy.model), config.trainer)
    return list(fit(model, config.trainer, config.engine, (device_gb * 1e9 or room_here(), speeds)).findings)


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
