"""Reading scores: legal forms, and everything that is a failure instead."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.core.errors import EvaluatorFailed
from qwengyre.sandbox.reward import MAX_REWARD_BYTES, read_reward


@pytest.mark.parametrize(
    ("name", "text", "score"),
    [
        ("reward.txt", "0", 0.0),
        ("reward.txt", " 0.25\n", 0.25),
        ("reward.txt", "1e-3", 0.001),
        ("reward.json", "1", 1.0),
        ("reward.json", '{"reward": 0.5, "speed": 3}', 0.5),
        ("reward.json", '{"accuracy": 0.5, "note": "x", "done": true}', 0.5),
    ],
)
def test_legal_scores(tmp_path, name, text, score):
    (tmp_path / name).write_text(text)
    assert read_reward(tmp_path) == score


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("reward.txt", "", "not a number"),
        ("reward.txt", "passed", "not a number"),
        ("reward.txt", "1_0", "not a number"),
        ("reward.txt", "0.5 0.5", "not a number"),
        ("reward.txt", "nan", "not a score"),
        ("reward.txt", "-inf", "not a score"),
        ("reward.txt", "-0.01", "outside"),
        ("reward.txt", "1.01", "outside"),
        ("reward.txt", "é", "not a number"),
        ("reward.json", "{", "not JSON"),
        ("reward.json", "null", "must hold a number"),
        ("reward.json", "true", "must hold a number"),
        ("reward.json", '{"reward": "1"}', "must hold a number"),
        ("reward.json", '{"reward": null, "accuracy": 1}', "must hold a number"),
        ("reward.json", '{"a": 0, "b": 1}', "must hold a number"),
        ("reward.json", "[1]", "must hold a number"),
        ("other.txt", "1", "neither"),
    ],
)
def test_failures(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(EvaluatorFailed, match=reason):
        read_reward(tmp_path)


def test_reward_txt_comes_first_and_a_task_may_widen_the_range(tmp_path):
    (tmp_path / "reward.json").write_text("1")
    (tmp_path / "reward.txt").write_text("-3")
    assert read_reward(tmp_path, low=-5.0, high=5.0) == -3.0


def test_links_folders_and_giants_are_not_read(tmp_path):
    (tmp_path / "real").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "real")
    with pytest.raises(EvaluatorFailed, match="cannot be read"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").unlink()
    (tmp_path / "reward.txt").mkdir()
    with pytest.raises(EvaluatorFailed, match="not a regular file"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").rmdir()
    (tmp_path / "reward.txt").write_text("1" + " " * MAX_REWARD_BYTES)
    with pytest.raises(EvaluatorFailed, match="at most 65,536"):
        read_reward(tmp_path)


@given(name=st.sampled_from(["reward.txt", "reward.json"]), data=st.binary(max_size=200))
def test_any_bytes_give_a_score_in_range_or_a_failure(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("verifier")
    (folder / name).write_bytes(data)
    try:
        score = read_reward(folder)
    except EvaluatorFailed:
        return
    assert math.isfinite(score) and 0 <= score <= 1
