import os
import stat
from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.telemetry.folder import RunFolder


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path):
    folders = [RunFolder.create(tmp_path, "my run/1", "a = 1\n") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.parent == tmp_path and folder.path.name.startswith("my-run-1-") for folder in folders)
    assert RunFolder.open(folders[1].path).config.read_text() == "a = 1\n"


def test_opening_something_else_names_the_runs_beside_it(tmp_path: Path):
    run = RunFolder.create(tmp_path, "quick", "")
    with pytest.raises(ConfigError, match=run.path.name):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(ConfigError, match=run.path.name):
        RunFolder.open(tmp_path)


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--runs-dir"):
        RunFolder.create(tmp_path / "file", "quick", "")


def test_a_run_folder_is_its_users_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = RunFolder.create(tmp_path / "runs", "r", "")
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        folder.path.chmod(0o755)
        assert stat.S_IMODE(RunFolder.open_to_resume(folder.path).path.stat().st_mode) == 0o700
    finally:
        os.umask(before)
