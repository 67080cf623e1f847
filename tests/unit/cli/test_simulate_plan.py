from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qwengyre.cli.config import explain
from qwengyre.cli.plan import plan
from qwengyre.cli.simulate import simulate
from qwengyre.cli.simulation import LEFT_OUT
from qwengyre.core.errors import ConfigError
from tests.unit.runtime.test_measured import journalled_run

SHORT = ["steps=3", "groups_per_step=2", "executions_per_group=4"]


def call_simulate(**change: object) -> None:
    simulate(
        **{
            "workload": "nl122_v1", "run": None, "seeds": "2", "policy": None, "override": SHORT, "training_nodes": 0,
            "standalone_nodes": 0, "two_way": False, "backlog": 0.0, "order": "dispatch", "max_staleness": None, "tune": False, "json": None, "html": None, "jobs": 1, **change,
        }
    )  # fmt: skip


def test_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    call_simulate(json=tmp_path / "out.json", html=tmp_path / "out.html")
    printed = capsys.readouterr().out
    assert "elastic" in printed and "colocate-standalone-streaming" in printed and "path bound" in printed
    data = json.loads((tmp_path / "out.json").read_text())
    assert [r["policy"] for r in data["results"]][:3] == ["elastic", "async", "async-streaming"]
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") == 1 + len(data["results"])
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "src=" not in page


def test_a_simulation_of_a_run_says_what_of_the_run_is_not_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, _ = journalled_run(tmp_path)
    call_simulate(workload=None, run=folder.path, seeds="1", override=[], policy=["elastic"])
    assert LEFT_OUT in capsys.readouterr().out
    call_simulate(policy=["elastic"])
    assert LEFT_OUT not in capsys.readouterr().out


def test_json_alone_on_the_standard_output(capsys: pytest.CaptureFixture[str]):
    call_simulate(json=Path("-"), policy=["elastic"])
    assert [r["policy"] for r in json.loads(capsys.readouterr().out)["results"]] == ["elastic"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": None}, "give a workload"),
        ({"workload": "nl122_v9"}, "no such workload"),
        ({"seeds": "0"}, "names no seeds"),
        ({"seeds": "1,x"}, "names no seeds"),
        ({"policy": ["fast"]}, "'fast' is not one of elastic"),
        ({"override": ["steps"]}, "is not KEY=VALUE"),
        ({"override": ["stepz=3"]}, "is not KEY=VALUE with one of steps"),
        ({"override": ["overall_timeout_h=-1"]}, "must be above zero"),
        ({"policy": ["async"], "training_nodes": 5}, "training_nodes = 5 must be a multiple"),
        ({"run": Path("nowhere"), "workload": None}, "not the folder of a run"),
        ({"run": Path("nowhere")}, "not both"),
    ],
)
def test_bad_input_is_refused_with_what_to_change(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        call_simulate(**change)


def test_plan_prints_the_best_the_front_and_the_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan(
        workload="nl122_v1", run=None, max_staleness=1, seeds="1", override=SHORT, html=tmp_path / "plan.html", json=None, jobs=1
    )
    printed = capsys.readouterr().out
    assert "Pareto front" in printed and "On fresh seeds" in printed
    assert '[scheduler]\npolicy = "elastic"' in printed and "max_staleness = 1" in printed
    assert "<svg" in (tmp_path / "plan.html").read_text()


def test_plan_refuses_a_negative_cap():
    with pytest.raises(ConfigError, match="max_staleness = -1"):
        plan(
            workload="nl122_v1", run=None, max_staleness=-1, seeds="1", override=SHORT, html=Path("plan.html"), json=None, jobs=1
        )


def test_the_keys_of_a_workload_are_explained(capsys: pytest.CaptureFixture[str]):
    explain("workload")
    printed = capsys.readouterr().out
    assert "# overall_timeout_h =            must be given" in printed and "# publish_s = 60.0" in printed


BRIEF = [*SHORT, "median_h=0.03", "overall_timeout_h=0.1", "train_node_hours_per_step=0.02", "optimizer_s=0.1", "publish_s=0.2"]
BRIEF += ["to_training_s=0.1", "to_rollout_s=0.1", "move_stall_s=0.1"]


def dots(page: str, css: str) -> list[tuple[float, float]]:
    """Centers of a chart's circles, in pixels: y grows downwards."""
    return [(float(x), float(y)) for x, y in re.findall(rf'<circle class="dot {css}" cx="([\d.]+)" cy="([\d.]+)"', page)]


def call_plan(folder: Path, seeds: str, override: list[str]) -> str:
    html = folder / "plan.html"
    plan(workload="nl122_v1", run=None, max_staleness=1, seeds=seeds, override=override, html=html, json=None, jobs=1)
    return html.read_text()


@pytest.mark.parametrize("override", [SHORT, BRIEF], ids=["hours", "minutes"])
@pytest.mark.parametrize("seeds", ["1", "3", "7,2"])
def test_no_dot_of_a_plan_beats_the_line_of_its_front(tmp_path: Path, seeds: str, override: list[str]):
    page = call_plan(tmp_path, seeds, override)
    (path,) = re.findall(r'<path class="line series-2" d="M([^"]*L[^"]*|[\d. ]+)"/>', page)
    front = [tuple(map(float, corner.split())) for corner in path.split(" L")]
    everything = dots(page, "muted faint") + dots(page, "series-1")
    assert len(everything) > 10
    assert dots(page, "series-2") == front
    for x, y in everything:
        assert not any(x <= left and y > low for left, low in front), "faster and fresher would be left of and below a corner"
        assert any(left <= x and low >= y for left, low in front), "every dot is beaten by one on the line, or is on it"


def test_a_plan_of_minutes_is_told_in_minutes(tmp_path: Path):
    page = call_plan(tmp_path, "1", BRIEF)
    assert "0.0 h" not in page and not re.search(r"\d h\b", page) and re.search(r"\d min\b", page)
    assert re.search(r"\d h\b", call_plan(tmp_path, "1", SHORT))


@pytest.mark.parametrize(("seeds", "said"), [("1", "with 1 seed by"), ("2", "with 2 seeds by")])
def test_a_comparison_counts_its_seeds_and_minutes(seeds: str, said: str, tmp_path: Path):
    call_simulate(seeds=seeds, policy=["elastic"], override=BRIEF, html=tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert said in page and ">minutes</text>" in page and ">hours</text>" not in page and not re.search(r"\d h\b", page)
