from __future__ import annotations

import tomllib
from pathlib import Path

from qwengyre.runtime.run_config import load_run

RECIPES = Path(__file__).parents[3] / "recipes"


def test_the_vllm_quickstart_is_the_quickstart_with_another_engine():
    default, vllm = (tomllib.loads((RECIPES / name).read_text()) for name in ("quickstart.toml", "quickstart-vllm.toml"))
    for table in ("runtime", "engine"):
        default.pop(table, None), vllm.pop(table, None)
    assert vllm == default
    assert load_run(RECIPES / "quickstart-vllm.toml").engine.engine == "vllm"
