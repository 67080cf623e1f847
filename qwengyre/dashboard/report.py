"""report.html of one run, and one page or picture that compares several. Self-contained: open the file, send it, keep it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import qwengyre
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError
from qwengyre.core.text import html_text
from qwengyre.dashboard import charts
from qwengyre.dashboard.costs import RunCosts, run_costs
from qwengyre.dashboard.executions import ExecutionTable
from qwengyre.dashboard.hints import hint_of
from qwengyre.dashboard.live import outcome_rows
from qwengyre.dashboard.page import page, pairs, section, stacked, standalone, table, tiles
from qwengyre.dashboard.series import RunSeries, alike, run_series
from qwengyre.dashboard.view import clock
from qwengyre.sim.compare import Report as Simulated
from qwengyre.sim.settings import OURS
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.learning import note_of_all
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trajectory.config import TrajectoryConfig

STEP_COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward_mean", ".3f"),
    ("groups", "num_groups", "d"),
    ("executions", "num_executions", "d"),
    ("tokens", "tokens_trained", ",d"),
    ("joins", "joins_mid_step", "d"),
    ("staleness", "staleness_mean", ".2f"),
    ("clipped", "clip_fraction", ".3f"),
    ("max log-ratio", "log_ratio_max", ".2g"),
    ("grad norm", "gradient_norm", ".3g"),
    ("seconds", "seconds", ".1f"),
)


def write_report(folder: RunFolder, *, more: Sequence[str] = ()) -> Path:
    """Write report.html of the run in `folder`, as far as it has come, and return its path. `more`: sections of its own below."""
    run = run_series(folder)
    return _replace(folder.report, report_html(run, read_costs(folder, run), more=more))


def read_costs(folder: RunFolder, run: RunSeries) -> RunCosts:
    """What the run in `folder` cost so far. Raises JournalError."""
    table = ExecutionTable(folder.controller_journal)
    table.refresh(math.inf)
    config = RecordedConfig(folder.config)
    ranks = config.table("trainer", TrainerConfig).ranks
    keeps_zero = config.table("trajectory", TrajectoryConfig).keep_zero_advantage
    return run_costs(run, table, devices_per_cell=ranks, keeps_zero=keeps_zero)


def cost_sections(costs: RunCosts) -> list[str]:
    """What a run cost: one card."""
    total, idle = sum(costs.device_h.values()), sum(costs.idle_h.values())
    devices = "device hours" if costs.devices_per_cell > 1 else "device hours, one device a cell"
    rows = [(devices, _hours(total), ", ".join(f"{role} {_hours(hours)}" for role, hours in costs.device_h.items() if hours))]
    rows.append(("of these idle", f"{_hours(idle)} ({idle / total:.0%})" if total else "0", "by cause, below"))
    rows += [(f"- {cause}", _hours(hours), "") for cause, hours in costs.idle_h.items() if hours > 0]
    rows.append(
        (
            "sandbox hours",
            _hours(costs.sandbox_h),
            "from a start to its score, a wait for a place included, summed over executions",
        )
    )
    thrown = costs.tokens_thrown_away
    share = f" ({thrown / costs.tokens_generated:.0%})" if costs.tokens_generated else ""
    rows.append(
        (
            "tokens generated",
            f"{costs.tokens_generated:,}",
            f"of them {thrown:,}{share} were sampled for training and not trained",
        )
    )
    rows += [(f"- {fate}", f"{count:,}", "") for fate, count in costs.tokens_by_fate.items()]
    return [section("What it cost", "Devices, sandboxes and tokens, and where they went.", pairs(rows))]


def _hours(hours: float) -> str:
    """
    >>> _hours(0.05), _hours(12.34)
    ('3.0 min', '12.3 h')
    """
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def write_picture(folder: RunFolder, out: Path) -> Path:
    """The scores of one run above its cell timeline, as an SVG file that shows in light and dark."""
    run = run_series(folder)
    return _replace(out, standalone(stacked([charts.scores(run), charts.timeline(run)], run.label)))


def write_comparison(folders: Sequence[RunFolder], out: Path) -> Path:
    """Held-out scores of several runs in one page, or in one picture when `out` ends in .svg.

    Raises ConfigError when a run has no evaluation yet.
    """
    runs = [run_series(folder) for folder in folders]
    for run in runs:
        if not run.evaluations:
            raise ConfigError("this run has no evaluation to compare yet", file=run.label)
    if out.suffix == ".svg":
        return _replace(out, standalone(charts.comparison(runs, by_time=False)))
    return _replace(out, comparison_html(runs))


def report_html(run: RunSeries, costs: RunCosts | None = None, *, more: Sequence[str] = ()) -> str:
    """The report of one run as HTML. `more`: sections of its own below."""
    body = [
        f"<h1>{html_text(run.label)}</h1><div class='sub'>{html_text(state_of(run))}</div>",
        *report_sections(run, costs),
        *more,
        f"<footer>QwenGyre {qwengyre.__version__}. Times are on the run's clock.</footer>",
    ]
    return page(f"{run.label} - QwenGyre", body)


def report_sections(run: RunSeries, costs: RunCosts | None = None) -> list[str]:
    """What the report shows, without its frame: the dashboard has its own. Without `costs` what it cost is left out."""
    return [
        tiles(_tiles(run)),
        *_warnings(run),
        section(
            "Reward by step",
            "Mean reward of each step's executions, and of held-out tasks before, during and after.",
            charts.scores(run),
        ),
        section(
            "Waterlevel and cell roles",
            "Executions dispatched and not finished, against what the cells in rollout can serve. A cell leaves for training once the "
            "others can serve what is left. Dotted lines are optimizer steps.",
            charts.timeline(run),
        ),
        *_plans(run),
        section("Time by role", "How the cells spent the run.", charts.time_by_role(run)),
        section("Counts", "With what is good beside them.", pairs(_counts(run))),
        *(cost_sections(costs) if costs is not None else ()),
        section(
            "Health of training",
            "One number each, by step or by time; the last value beside its name, what is good below it.",
            f'<div class="grid3">{"".join(charts.health(run))}</div>',
        ),
        section(
            "All steps",
            "",
            f"<details id='steps-table'><summary>{len(run.steps)} steps as a table</summary>{_step_table(run)}</details>",
        ),
    ]


def baselines_section(found: Simulated, left_out: str) -> str:
    """How long a run would have taken under the baselines: a simulation, beside that of the run as it was."""
    ours = next(result for result in found.results if result.policy == OURS)
    rows = [
        [
            result.policy,
            _hours(result.hours),
            f"{result.hours / ours.hours:.2f}",
            "" if result is ours else f"{1 - ours.hours / result.hours:+.0%}",
            f"{result.staleness_mean:.2f}",
            f"{result.idle_rollout:.0%}",
            f"{result.idle_training:.0%}",
        ]
        for result in found.results
    ]
    header = ("policy", "time", "ratio", "elastic saves", "staleness", "idle rollout", "idle training")
    why = f"Simulated from this run's journal: the same executions, micro-steps and switches under each policy. {left_out}"
    return section("What elastic saved", why, table(header, rows, num_names=1))


def comparison_html(runs: Sequence[RunSeries]) -> str:
    """Several runs in one page: by step, by time, and a table with the means of runs that differ by their seed only."""
    body = [
        f"<h1>{len(runs)} runs</h1><div class='sub'>Held-out score at the training temperature.</div>",
        section(
            "By step",
            "Thin: one run. Bold: the mean over runs that differ by their seed only.",
            charts.comparison(runs, by_time=False),
        ),
        section("By time", "The same evaluations, on each run's clock.", charts.comparison(runs, by_time=True)),
        section(
            "Outcome",
            "",
            table(
                ("run", "policy", "before", "after", "gain", "greedy before", "greedy after", "steps", "minutes", "idle"),
                _outcomes(runs),
                num_names=2,
            ),
        ),
        f"<footer>QwenGyre {qwengyre.__version__}</footer>",
    ]
    return page("Comparison - QwenGyre", body)


def state_of(run: RunSeries) -> str:
    """How a run stands, in a line."""
    unfinished = "running" if run.is_running else "interrupted: `qwengyre train --resume` continues it"
    if not run.began and not run.is_running:
        unfinished = "being prepared (a policy that is made first takes minutes), or stopped before it began"
    state = unfinished if run.ended is None else run.ended.reason
    cells = f"{run.began[0].num_cells} cells, policy {run.policy}" if run.began else "not begun"
    return f"{cells}, {clock(run.end_s)} on the run's clock, {state}"


def _tiles(run: RunSeries) -> list[tuple[str, str, str]]:
    summary = run.summary
    first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else (None, None)
    score = "-" if last is None else f"{last.score:.2f}"
    greedy = "-" if last is None else f"{last.greedy:.2f}"
    return [
        (
            "Held-out score",
            score,
            f"from {first.score:.2f} ({last.score - first.score:+.2f})" if first and last else "not evaluated yet",
        ),
        ("Greedy", greedy, f"from {first.greedy:.2f} ({last.greedy - first.greedy:+.2f})" if first and last else ""),
        ("Steps", str(len(run.steps)), f"in {clock(run.end_s)}"),
        (
            "Calls moved",
            str(summary.calls_moved),
            f"{summary.switches_to_training} switches to training, {summary.switches_to_rollout} back",
        ),
        ("Joins in mid-step", str(summary.joins_mid_step), f"idle share {summary.idle_share:.0%}"),
        ("Peak memory", f"{max([summary.peak_rss_gb, *(rate.memory_gb for rate in run.rates)]):.1f} GB", "all processes, PSS"),
    ]


def _warnings(run: RunSeries) -> list[str]:
    note = note_of_all(run.steps)
    return [section("Steps that taught nothing", f"{note[0].upper()}{note[1:]}.")] if note else []


def _plans(run: RunSeries) -> list[str]:
    """What `scheduler.tune` decided, and why; nothing for a run without a plan of its own."""
    if not run.plans:
        return []
    done = [(plan, sum(step.at <= plan.at for step in run.steps)) for plan in run.plans]
    rows = [[clock(plan.at), str(steps), charts.plan_words(plan), plan.reason] for plan, steps in done]
    why = (
        "What scheduler.tune made of the run's own durations, in place of the run file's values. A plan holds from the next publish on. "
        "In the chart above: steps a burst x, steps ahead."
    )
    return [section("Plans", why, table(("at", "steps done", "plan", "why"), rows, num_names=4))]


def _counts(run: RunSeries) -> list[tuple[str, str, str]]:
    rows = [(name, value, hint_of(name).beside(run.summary)) for name, value in outcome_rows(run.summary)]
    return rows + _resumes(run)


def _resumes(run: RunSeries) -> list[tuple[str, str, str]]:
    return [
        (
            "resumed",
            f"at {clock(began.at)}: {began.executions_kept} finished executions kept, {began.executions_redispatched} dispatched again",
            "",
        )
        for began in run.began
        if began.resumed
    ]


def _step_table(run: RunSeries) -> str:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [[show(getattr(step, field), form) for _, field, form in STEP_COLUMNS] for step in run.steps]
    return table([name for name, _, _ in STEP_COLUMNS], rows)


def _outcomes(runs: Sequence[RunSeries]) -> list[list[str]]:
    rows = []
    numbers: dict[int, tuple[float, ...]] = {}
    for run in runs:
        first, last = run.evaluations[0], run.evaluations[-1]
        numbers[id(run)] = (
            first.score,
            last.score,
            last.score - first.score,
            first.greedy,
            last.greedy,
            len(run.steps),
            run.end_s / 60,
            run.summary.idle_share,
        )
        rows.append([run.label, run.policy, *_shown(numbers[id(run)])])
    for label, members in alike(runs).items():
        if len(members) > 1:
            means = tuple(sum(column) / len(members) for column in zip(*(numbers[id(run)] for run in members), strict=True))
            rows.append([f"mean of {len(members)}", label, *_shown(means)])
    return rows


def _shown(numbers: Sequence[float]) -> list[str]:
    forms = (".3f", ".3f", "+.3f", ".3f", ".3f", ".0f", ".1f", ".0%")
    return [format(number, form) for number, form in zip(numbers, forms, strict=True)]


def _replace(path: Path, content: str) -> Path:
    """Write beside and rename, so that a browser never reads half a page."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"cannot write this file ({error.strerror})", file=str(path)) from error
    return path
