from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from qwengyre.dashboard.live import PLAIN_EVERY_S, LiveScreen, RoleHistory, outcome_table, plain, render
from qwengyre.telemetry.summary import Summary
from qwengyre.telemetry.view import CellView, View

CELLS = (
    CellView(0, "training"),
    CellView(1, "rollout", 5),
    CellView(2, "to_training"),
    CellView(3, "lost"),
)
VIEW = View(
    at=75.0,
    name="quickstart",
    policy="elastic",
    doing="training",
    step=6,
    num_steps=40,
    version=6,
    cells=CELLS,
    waterlevel=18,
    capacity=14,
    max_capacity=24,
    groups_done=31,
    groups_open=5,
    executions_finished=250,
    executions_running=18,
    rewards=(0.2, 0.3, 0.41),
    score_before=0.27,
    score_now=0.33,
    tokens_per_s=2913.0,
    memory_gb=2.4,
    remaining_s=312.0,
)


def at(view: View, **changes) -> View:
    return msgspec.structs.replace(view, **changes)


def drawn(view: View, width: int, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width)
    history = RoleHistory()
    history.observe(view)
    console.print(render(view, history, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [40, 70, 100, 160])
def test_the_screen_shows_every_promised_number_at_any_width(width: int):
    text = " ".join(drawn(VIEW, width).replace("│", " ").split())
    for part in (
        "training",
        "rollout",
        "→ training",
        "lost",
        "18, room for 14",
        "31 groups done",
        "step 6 of 40",
        "0.41",
        "0.33",
        "2.9k tokens/s",
        "5:12 left",
    ):
        assert part in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_every_cell_has_one(width: int):
    lines = drawn(VIEW, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert sum(" cell " in line for line in lines) == len(CELLS)
    assert "…" not in "".join(lines[2:])


def test_more_cells_than_lines_are_counted():
    many = tuple(CellView(cell, "rollout" if cell < 40 else "training") for cell in range(64))
    text = drawn(at(VIEW, cells=many), 80, 24)
    assert len(text.splitlines()) <= 24
    assert "and 51 more: 27 rollout, 24 training" in text


def test_a_view_without_scores_or_cells_is_drawn():
    assert "none yet" in drawn(
        at(VIEW, cells=(), rewards=(), score_now=None, score_before=None, remaining_s=None, waterlevel=0, max_capacity=0), 80
    )


def test_away_from_a_terminal_lines_come_at_changes_and_now_and_then():
    console = Console(file=io.StringIO(), width=200)
    with LiveScreen(console) as screen:
        screen.update(VIEW)
        screen.update(at(VIEW, at=76.0))
        screen.update(at(VIEW, at=77.0, step=7))
        screen.update(at(VIEW, at=77.0 + PLAIN_EVERY_S, step=7))
        screen.say("cell 3 lost; starting it again")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(" · ")[0] for line in lines[:3]] == [
        "1:15  training  step 6/40",
        "1:17  training  step 7/40",
        "1:32  training  step 7/40",
    ]
    assert lines[3:] == ["1:32  cell 3 lost; starting it again"]


def test_a_plain_line_says_it_all():
    assert plain(VIEW) == (
        "1:15  training  step 6/40 · cells TR~x · waterlevel 18/14 · groups 31 · 2.9k tokens/s · reward 0.41 · held-out 0.33 · 5:12 left"
    )


def test_on_a_terminal_the_screen_is_redrawn_and_gone_at_the_end_while_what_was_said_stays():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    with LiveScreen(console) as screen:
        screen.progress("warm-up: update 20")
        screen.update(VIEW)
        screen.say("evaluation at version 6: 0.33")
        screen.update(at(VIEW, at=90.0))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warm-up: update 20" in output and "1:15  evaluation at version 6" in output
    assert output.count("QwenGyre") >= 3
    assert output.rstrip().endswith("\x1b[2K")


def test_role_history_fills_the_moments_between_two_views():
    history = RoleHistory()
    history.observe(at(VIEW, at=0.0))
    history.observe(at(VIEW, at=3.0, cells=(CellView(0, "rollout"),)))
    assert list(history.roles[0]) == ["training", "rollout", "rollout", "rollout"]


def test_the_outcome_table_shows_the_gain():
    console = Console(file=io.StringIO(), width=100)
    summary = Summary(score_before=0.27, score_after=0.71, greedy_before=0.5, steps=40, max_logprob_gap=3e-6)
    console.print(outcome_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("0.270 → 0.710 (+0.440)", "3.0e-06"):
        assert part in text
