from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.cli import doctor
from qwengyre.core.errors import ConfigError


def test_a_machine_that_runs_these_tests_lacks_no_package():
    assert [finding for finding in doctor.packages() if finding.verdict != "ok"] == []


def test_little_memory_is_noted_with_what_to_do(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4000000 kB\nMemAvailable:  2000000 kB\n")
    [finding] = doctor.memory(meminfo)
    assert (finding.verdict, finding.found) == ("note", "2.0 GB free")
    assert "6 GB" in finding.todo


def test_what_is_missing_fails_and_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "EXAMINATIONS", (doctor.python, doctor.isolation))
    with pytest.raises(ConfigError, match="missing: bubblewrap"):
        doctor.doctor()
    assert 'isolation = "none"' in capsys.readouterr().out


def test_every_examination_finds_something():
    assert all(examine() for examine in doctor.EXAMINATIONS)
