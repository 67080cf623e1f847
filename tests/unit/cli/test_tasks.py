"""`qwengyre tasks check`: output and exit code."""

from __future__ import annotations

import pytest

from qwengyre.cli.main import application


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        application(["tasks", "check", *arguments])(["tasks", "check", *arguments])
    return end.value.code


def test_good_tasks_pass_and_warnings_do_not_fail(tmp_path, capsys):
    folder = tmp_path / "tasks/a"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[agent]\ncolour = 1\n")
    (folder / "instruction.md").write_text("Say hello.")
    (folder / "tests/test.sh").write_text("echo 1 > $VERIFIER_DIR/reward.txt")
    assert run(str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "task.toml:2: warning: agent.colour" in out and "1 tasks usable, 0 errors, 1 warnings" in out


def test_errors_fail_with_file_and_line(tmp_path, capsys):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "task.toml").write_text("\n[agent]\ntimeout_sec = 'x'\n")
    assert run(str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert f"{folder}/task.toml:3: error: agent.timeout_sec" in out and "0 tasks usable, 3 errors" in out


def test_a_missing_folder_is_a_user_error(tmp_path, capsys):
    assert run(str(tmp_path / "nowhere")) == 2
    assert "does not exist" in capsys.readouterr().err
