"""The public names exist, are told in docs/from-python.md, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qwengyre
from qwengyre.bench.made_up_run import MadeUpRun, write_made_up_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-python.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", qwengyre.__all__)
def test_every_public_name_is_there_documented_and_told(name: str):
    value = getattr(qwengyre, name)
    assert isinstance(value, dict) or (value.__doc__ or "").strip()
    assert f"`{name}`" in PAGE


def test_the_page_tells_no_name_that_is_not_public():
    told = re.findall(r"`(\w+)`", PAGE.split("## What to build on")[1])
    assert set(told) == set(qwengyre.__all__)


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qwengyre.nothing


def test_import_alone_loads_nothing_heavy():
    code = "import qwengyre, sys; print([m for m in ('torch', 'msgspec', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(examples) >= 5
    names = {"__name__": "from_python"}
    exec(compile("\n".join(examples), "docs/from-python.md", "exec"), names)
    folder = write_made_up_run(tmp_path, MadeUpRun(num_executions=8, executions_per_group=2, groups_per_step=2, num_gateways=2))
    rewards = names["rewards"](str(folder.path))
    assert len(rewards) == 8 and all(num_trainable > 0 for _, num_trainable in rewards.values())
