"""What a user gets who installs the wheel: an empty environment, an empty folder, no checkout. `make test-wheel`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ("tasks.num_train=4", "tasks.num_held_out=2", "scheduler.steps=1", "scheduler.groups_per_step=2", "evaluation.samples=1")


class Installed:
    """A new environment with the wheel in it; what it depends on is taken from this one."""

    def __init__(self, folder: Path):
        self.home = folder / "home"
        self.home.mkdir()
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--wheel-dir",
            str(folder),
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        [self.wheel] = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        python = folder / "venv" / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(self.wheel)], check=True)
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        Path(site.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # no .pth of there is read
        self.program = folder / "venv" / "bin" / "qwengyre"

    def run(self, *words: str) -> str:
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        done = subprocess.run([str(self.program), *words], cwd=self.home, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_is_the_wheel_that_runs(installed: Installed):
    python = installed.program.parent / "python"
    where = [str(python), "-c", "import qwengyre; print(qwengyre.__file__)"]
    done = subprocess.run(where, cwd=installed.home, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(str(installed.program.parents[1]))


def test_the_pages_and_recipes_are_in_it(installed: Installed):
    listed = installed.run("docs")
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {line.split()[0] for line in listed.splitlines()}
    assert installed.run("docs", "training", "--raw") == (ROOT / "docs" / "training.md").read_text()
    assert "quickstart " in installed.run("init", "--recipe", "list")
    assert "make " not in installed.run("doctor")


def test_a_first_own_run_is_checked_from_an_empty_folder(installed: Installed):
    installed.run("init", "mine")
    assert "2 of 2 tasks can be learned from" in installed.run("tasks", "check", "mine/tasks/train", "--solve")
    paths = ("--set", "tasks.train=mine/tasks/train", "--set", "tasks.held_out=mine/tasks/held-out")
    assert "ok" in installed.run("config", "check", "mine/run.toml", *paths)


@pytest.mark.timeout(1800)
def test_the_quickstart_trains_from_an_empty_folder(installed: Installed):
    installed.run("init", "--recipe", "quickstart")
    words = [word for change in SMALL for word in ("--set", change)]
    installed.run("train", "quickstart.toml", *words)
    [run] = (installed.home / "runs").iterdir()
    assert (run / "report.html").is_file() and (run / "checkpoints" / "step-000001").is_dir()
