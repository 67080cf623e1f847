from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwengyre.cli import doctor as command
from qwengyre.core.errors import ConfigError
from qwengyre.doctor import models
from qwengyre.testing import model_trials

FAMILIES = ["llama", "qwen3_moe", "qwen3_5_text", "openai-gpt"]


def test_families_are_tried_and_every_cell_says_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Dense, mixture, hybrid, and one that does not go through transformers' attention."""
    command.doctor(FAMILIES, models=True, json=tmp_path / "matrix.json")
    rows = {row["family"]: row["cells"] for row in json.loads((tmp_path / "matrix.json").read_text())}
    assert list(rows) == FAMILIES
    for family in FAMILIES[:3]:
        words = {column: cell["word"] for column, cell in rows[family].items()}
        assert words == dict.fromkeys(models.COLUMNS, "exact") | dict.fromkeys(models.ELSEWHERE, "not run")
    assert rows["openai-gpt"]["trainer"]["word"] == "refused"
    said = capsys.readouterr().out
    assert "openai-gpt, trainer: " + rows["openai-gpt"]["trainer"]["reason"] in said


def test_a_family_that_computes_otherwise_is_wrong_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def differs(model: object) -> None:
        raise model_trials.WrongModel("off by 2 nats")

    monkeypatch.setattr(model_trials, "try_embedded", differs)
    with pytest.raises(ConfigError, match="wrong: llama"):
        command.doctor(["llama"], models=True)
    assert "llama, embedded: WrongModel: off by 2 nats" in capsys.readouterr().out


def test_a_family_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="'lama'"):
        command.doctor(["lama"], models=True)
    with pytest.raises(ConfigError, match="--models"):
        command.doctor(["llama"])
