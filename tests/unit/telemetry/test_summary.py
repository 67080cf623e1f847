import json
from pathlib import Path

import pytest

from qwengyre.core.errors import JournalError
from qwengyre.telemetry.summary import Summary, read_summary, write_summary

FIELDS = [
    "score_before",
    "score_after",
    "greedy_before",
    "greedy_after",
    "steps",
    "minutes",
    "peak_rss_gb",
    "switches_to_training",
    "switches_to_rollout",
    "calls_moved",
    "tokens_recomputed_after_move",
    "tokens_recomputed_at_publish",
    "steps_that_taught_nothing",
    "note",
    "clip_fraction",
    "joins_mid_step",
    "compactions",
    "sub_agents",
    "timeouts_scored",
    "executions_finished",
    "executions_lost",
    "max_logprob_gap",
    "staleness_mean",
    "staleness_max",
    "idle_share",
]


def test_the_file_has_exactly_the_promised_fields(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_summary(path, Summary(steps=3, score_before=0.25))
    assert list(json.loads(path.read_text())) == FIELDS
    assert read_summary(path) == Summary(steps=3, score_before=0.25)


def test_rewriting_leaves_one_file(tmp_path: Path):
    for steps in (1, 2):
        write_summary(tmp_path / "summary.json", Summary(steps=steps))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(tmp_path / "summary.json") == Summary(steps=2)


def test_before_the_first_step_there_is_none(tmp_path: Path):
    assert read_summary(tmp_path / "summary.json") is None


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "summary.json").write_text('{"steps":')
    with pytest.raises(JournalError, match=r"summary\.json: not a summary"):
        read_summary(tmp_path / "summary.json")
