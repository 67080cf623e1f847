from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from starlette.testclient import TestClient

from qwengyre.cli.report import report
from qwengyre.core.errors import ConfigError
from qwengyre.dashboard import charts
from qwengyre.dashboard.hints import HEALTH, OUTCOME, hint_of
from qwengyre.dashboard.live import outcome_rows, outcome_table
from qwengyre.dashboard.report import report_html, write_comparison, write_picture, write_report
from qwengyre.dashboard.series import RoleSpan, alike, run_series, series_of, thin
from qwengyre.dashboard.server import HOST, dashboard_app, listen
from qwengyre.journal import Journal
from qwengyre.runtime.records import ControllerRecord
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics
from qwengyre.telemetry.records import PlanAdopted, RolesChanged
from qwengyre.telemetry.summary import Summary, write_summary
from tests.unit.dashboard.synthetic import evaluation, small_run, step


def folder_of(tmp_path: Path, name: str, records) -> RunFolder:
    folder = RunFolder.create(tmp_path, name, "")
    with Metrics(folder) as metrics:
        for record in records:
            metrics.record(record)
    write_summary(folder.summary, Summary(steps=3, calls_moved=7, compactions=11, sub_agents=5, timeouts_scored=2))
    return folder


def run_of(records):
    return series_of(records, Summary(), label="a run")


def figures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_the_report_is_one_file_that_needs_no_other_and_runs_no_script(tmp_path: Path):
    html = write_report(folder_of(tmp_path, "quick", small_run())).read_text()
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import", html)
    assert set(re.findall(r"https?://[^\"' <]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in html
    assert len(figures(html)) >= 12


def test_plans_of_the_tuner_are_drawn_below_the_cells_and_told_with_their_reasons():
    """From when each was made to the next one, on the time axis of the cells above; a run without plans has neither."""
    plans = [
        PlanAdopted(12.0, 2, 0.5, False, 0.0, "3.1 h instead of 3.4 <by simulation>"),
        PlanAdopted(14.0, 1, 1.0, True, 0.5, "less staleness"),
    ]
    run = run_of([*small_run()[:-1], *plans, small_run()[-1]])
    figure = ElementTree.fromstring(charts.timeline(run))
    bars = [bar for bar in figure.iter() if bar.get("class") == "fill plan"]
    cells = [bar for bar in figure.iter() if "rollout" in bar.get("class", "") and bar.tag.endswith("rect")]
    assert len(bars) == 2 and float(bars[0].get("y")) > max(float(bar.get("y")) for bar in cells)
    left, right = (float(bar.get("x")) for bar in bars)
    per_second = (right - left) / 2.0
    ends = [float(bar.get("x")) + float(bar.get("width")) + 2 for bar in bars]
    assert ends == pytest.approx([right, right + 6.0 * per_second], abs=0.2)
    assert "".join(bars[1].itertext()) == "0:14: 1 step a burst, 1 ahead, two-way, backlog 0.5; less staleness"
    html = report_html(run)
    assert "<td>0:12</td><td>1</td><td>2 steps a burst, 0.5 ahead</td><td>3.1 h instead of 3.4 &lt;by simulation&gt;</td>" in html
    without = report_html(run_of(small_run()))
    assert "<h2>Plans</h2>" in html and "<h2>Plans</h2>" not in without and "fill plan" not in without


def test_a_label_at_the_right_edge_of_several_runs_stays_inside_the_picture():
    """Names of runs are as long as their users make them; the legend has them whole, and says of one run not that it is 1 runs."""
    runs = [
        msgspec.structs.replace(run_of(small_run(policy)), label=policy) for policy in ("elastic", "a-policy-with-a-long-name")
    ]
    html = charts.comparison(runs, by_time=False)
    labels = [text for text in ElementTree.fromstring(html).iter() if re.match(r"\d\.\d\d ", text.text or "")]
    assert len(labels) == 2
    assert all(float(text.get("x")) + 8 * len(text.text) <= charts.WIDTH for text in labels)
    assert "a-policy-with-a-long-name" in html and "(1 runs)" not in html


def test_the_report_shows_the_counts_and_the_gain(tmp_path: Path):
    html = write_report(folder_of(tmp_path, "quick", small_run())).read_text()
    rows = dict(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td", html))
    assert rows["calls moved in mid-generation"].startswith("7 ")
    assert (rows["compactions"], rows["sub-agents"], rows["timeouts with a partial score"]) == ("11", "5", "2")
    assert "from 0.25 (+0.40)" in html


def test_every_chart_of_health_says_what_is_good():
    charted = charts.health(run_of(small_run()))
    said = [
        re.search(r'aria-label="([^"]+)".*<p class="hint">([^<]+)</p></div>$', chart, re.DOTALL).groups() for chart in charted
    ]
    assert [(unescape(title), unescape(hint)) for title, hint in said] == list(HEALTH.items())


@pytest.mark.parametrize(
    ("name", "summary", "verdict"),
    [
        ("executions", Summary(executions_lost=0), "good"),
        ("executions", Summary(executions_lost=2), "look at this"),
        ("steps", Summary(steps=4), "good"),
        ("steps", Summary(steps=4, steps_that_taught_nothing=1), "look at this"),
        ("steps", Summary(), ""),
        ("calls moved in mid-generation", Summary(calls_moved=3), "good"),
        ("calls moved in mid-generation", Summary(calls_moved=3, tokens_recomputed_after_move=9), "look at this"),
        ("calls moved in mid-generation", Summary(), ""),
        ("largest log-prob gap", Summary(max_logprob_gap=5.1e-5), "good"),
        ("largest log-prob gap", Summary(max_logprob_gap=0.05), ""),
        ("largest log-prob gap", Summary(max_logprob_gap=0.5), "look at this"),
        ("largest log-prob gap", Summary(), ""),
        ("clip fraction", Summary(steps=1, clip_fraction=0.2), "good"),
        ("clip fraction", Summary(steps=1, clip_fraction=0.8), "look at this"),
        ("idle share of cells", Summary(steps=1, idle_share=0.1), "good"),
        ("idle share of cells", Summary(steps=1, idle_share=0.8), ""),
        ("sub-agents", Summary(sub_agents=7), ""),
    ],
)
def test_a_figure_that_tells_by_itself_is_judged(name: str, summary: Summary, verdict: str, tmp_path: Path):
    assert hint_of(name).verdict(summary) == verdict
    folder = folder_of(tmp_path, "quick", small_run())
    write_summary(folder.summary, summary)
    rows = dict(re.findall(r'<tr><td>([^<]*)</td><td>[^<]*</td><td class="hint">([^<]*)</td>', write_report(folder).read_text()))
    assert rows[name].startswith(f"{verdict}: " if verdict else hint_of(name).text)
    console = Console(width=120, record=True, file=StringIO())
    console.print(outcome_table(summary))
    (line,) = (line for line in console.export_text().splitlines() if re.match(rf"│ {name} ", line))
    assert line.split("│")[3].strip() == verdict


def test_hints_are_of_figures_that_there_are():
    assert set(OUTCOME) <= {name for name, _ in outcome_rows(Summary())}


def test_waterlevel_and_roles_share_one_time_axis():
    figure = ElementTree.fromstring(charts.timeline(run_of(small_run())))
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in figure.iter(f"{space}rect") if "cell 0: " in (bar.findtext(f"{space}title") or "")]
    water = next(path for path in figure.iter(f"{space}path") if path.get("class") == "line water" and "V" in path.get("d", ""))
    x_of_8s_in_roles = float(bars[1].get("x", "nan"))
    x_of_8s_in_waterlevel = float(re.findall(r"H([\d.]+) V", water.get("d", ""))[0])
    assert x_of_8s_in_roles == x_of_8s_in_waterlevel
    hints = [bar.findtext(f"{space}title") for bar in bars]
    assert hints[:2] == ["cell 0: rollout from 0:00 to 0:08 (8.0 s)", "cell 0: to training from 0:08 to 0:09 (1.0 s)"]


def test_time_by_role_adds_up_the_spans():
    figure = charts.time_by_role(run_of(small_run()))
    assert "core: rollout 65.0%, 0:13" in figure  # 0-8 and 15-20 of 20 s
    assert "core: training 25.0%, 0:05" in figure
    assert "cell 1: lost 20.0%, 0:04" in figure


def test_roles_last_until_they_change_and_equal_neighbours_are_one_span():
    run = run_of([RolesChanged(0.0, 0, "rollout"), RolesChanged(2.0, 0, "rollout"), RolesChanged(3.0, 0, "lost"), step(1, 5.0)])
    assert run.spans == (RoleSpan(0, "rollout", 0.0, 3.0), RoleSpan(0, "lost", 3.0, 5.0))


def test_a_step_done_again_after_a_kill_counts_as_last_done():
    run = run_of([step(1, 1.0, 0.1), step(2, 2.0, 0.2), evaluation(2, 2.5, 0.3), step(2, 3.0, 0.9), evaluation(2, 4.0, 0.8)])
    assert [s.reward_mean for s in run.steps] == [0.1, 0.9]
    assert [e.score for e in run.evaluations] == [0.8]


@pytest.mark.parametrize("num_records", range(0, 18, 3))
def test_a_run_that_has_just_begun_has_a_report(num_records: int):
    assert all(figure.tag.endswith("svg") for figure in figures(report_html(run_of(small_run()[:num_records]))))


def test_names_cannot_break_the_page():
    html = report_html(series_of(small_run(), Summary(), label="<script>alert(1)</script>"))
    assert "<script>" not in html


def test_a_comparison_is_a_page_or_a_picture(tmp_path: Path):
    folders = [
        folder_of(tmp_path, f"{policy}-{seed}", small_run(policy, gain))
        for policy, seed, gain in (("elastic", 1, 0.4), ("elastic", 2, 0.5), ("async", 1, 0.3))
    ]
    html = write_comparison(folders, tmp_path / "compare.html").read_text()
    assert "mean of 2" in html and "+0.450" in html
    assert "elastic (2 runs)" in html
    picture = ElementTree.fromstring(write_comparison(folders, tmp_path / "compare.svg").read_text())
    assert picture.tag.endswith("svg")


def test_runs_that_have_nothing_to_do_with_each_other_are_not_averaged(tmp_path: Path):
    def named(name: str, steps: int) -> list:
        began, *rest = small_run()
        return [msgspec.structs.replace(began, name=name, num_steps=steps), *rest]

    kinds = (("a-1", "a", 3), ("a-2", "a", 3), ("b-1", "b", 3), ("a-long", "a", 9))
    folders = [folder_of(tmp_path, label, named(name, steps)) for label, name, steps in kinds]
    groups = alike([run_series(folder) for folder in folders])
    assert {label: len(runs) for label, runs in groups.items()} == {"a, 3 steps": 2, "b, 3 steps": 1, "a, 9 steps": 1}
    html = write_comparison(folders, tmp_path / "compare.html").read_text()
    assert html.count("mean of") == 1 and "mean of 2" in html


def test_a_picture_in_a_format_that_is_not_made_is_refused(tmp_path: Path):
    folder = folder_of(tmp_path, "run", small_run())
    with pytest.raises(ConfigError, match=r"x\.png: --out: a report is a page or a picture"):
        report([folder.path], out=tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_a_run_whose_policy_is_being_made_is_not_called_interrupted(tmp_path: Path):
    html = report_html(run_series(RunFolder.create(tmp_path, "new", "")))
    assert "being prepared" in html and "interrupted" not in html


def test_memory_is_that_of_the_chart_before_the_first_step_has_ended(tmp_path: Path):
    assert "2.1 GB" in report_html(run_of(small_run()[:9]))


def test_the_picture_of_a_run_holds_its_scores_and_its_timeline(tmp_path: Path):
    picture = write_picture(folder_of(tmp_path, "quick", small_run()), tmp_path / "run.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "version 3: held-out 0.650" in picture and "cell 0: training from 0:09" in picture


def test_a_run_without_evaluations_cannot_be_compared(tmp_path: Path):
    with pytest.raises(ConfigError, match="no evaluation"):
        write_comparison([folder_of(tmp_path, "new", [])], tmp_path / "compare.html")


def test_the_dashboard_draws_the_run_as_it_is_now_and_looks_again_until_its_end(tmp_path: Path):
    records = small_run()
    folder = folder_of(tmp_path, "quick", records[:-1])
    client = TestClient(dashboard_app(folder.path))
    assert "interrupted" in client.get("/").text
    with Journal.open(folder.controller_journal, ControllerRecord):
        assert 'data-live="3"' in client.get("/").text and "running" in client.get("/").text
    with Metrics(folder) as metrics:
        metrics.record(records[-1])
    assert 'data-live="0"' in client.get("/").text and "finished" in client.get("/").text
    assert client.get(f"/run/{folder.path.name}/summary.json").json()["calls_moved"] == 7


def test_a_taken_port_is_named():
    with listen(0) as taken, pytest.raises(ConfigError, match="--port"):
        listen(taken.getsockname()[1])
    assert HOST == "127.0.0.1"


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100)), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_largest_value_the_last_point_and_the_order(points: list[tuple[float, float]], most: int):
    points = sorted(points, key=lambda point: point[0])
    kept = thin(points, most)
    assert len(kept) <= max(len(points) if len(points) <= most else 0, 2 * (most + 1))
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
