"""The notebook of docs/ runs from top to bottom, as a kernel would run it: cell by cell, in one process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/read-a-run.ipynb"
RUN_CELLS = """
import json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
"""


def test_it_runs_from_top_to_bottom(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", RUN_CELLS, str(NOTEBOOK)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for said in (
        "816 executions",
        "rollout groups have no spread",
        "times fewer",
        "executions span several versions",
        "both ways",
    ):
        assert said in done.stdout
    assert (tmp_path / "run.svg").read_text().lstrip().startswith("<svg")


def test_it_is_kept_without_output():
    """What it prints depends on where it runs, and a diff of it says nothing."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
