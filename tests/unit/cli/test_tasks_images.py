"""`qwengyre tasks check` gets images: one that cannot be had is an error, unless it is waived."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.testing.images import layer, write_oci


def make(folder: Path, toml: str) -> Path:
    for name, text in {"task.toml": toml, "instruction.md": "x", "tests/test.sh": "echo 1 > $VERIFIER_DIR/reward.txt\n"}.items():
        (folder / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "t" / name).write_text(text)
    return folder


def check(*words: str):
    line = ["tasks", "check", *words]
    return CliRunner().invoke(application(line), line, env={"COLUMNS": "300"})


def test_an_image_that_cannot_be_had(tmp_path: Path):
    tasks = str(make(tmp_path / "tasks", '[environment]\ndocker_image = "oci:/nowhere/at/all"\n'))
    store = ["--set", f"sandbox.store={json.dumps(str(tmp_path / 'store'))}"]
    done = check(tasks, *store)
    assert done.exit_code == 1
    assert "/nowhere/at/all does not exist" in done.output.replace("\n", "")
    assert "0 tasks usable, 1 errors" in done.output
    done = check(tasks, *store, "--host-programs")
    assert (done.exit_code, "1 tasks usable, 0 errors" in done.output) == (0, True)


def test_one_image_for_all(tmp_path: Path):
    oci = write_oci(tmp_path / "oci", [layer(("a", b""))])
    tasks = str(make(tmp_path / "tasks", ""))
    keys = [f"sandbox.store={json.dumps(str(tmp_path / 'store'))}", f"sandbox.image={json.dumps(f'oci:{oci}')}"]
    done = check(tasks, *(word for key in keys for word in ("--set", key)))
    assert (done.exit_code, "1 tasks usable" in done.output) == (0, True)
    assert len(list((tmp_path / "store" / "images").iterdir())) == 1
