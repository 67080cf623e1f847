"""Whatever stands in a task.toml, the check answers with problems, and a task without an error loads."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.sandbox.task import check_task
from qwengyre.sandbox.task_toml import KNOWN

names = st.sampled_from(
    [*KNOWN[""], *KNOWN["agent"], *KNOWN["environment"], "reward_range", "agnet", "timeout", "x", "a.b", '"a b"']
)
scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "60", "${HOME}", "é"]),
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.sampled_from(["a", "B", "c d"]), scalars, max_size=2)
)
tables = st.dictionaries(st.sampled_from([*KNOWN, "metadata", "unknown"]), st.dictionaries(names, values, max_size=4), max_size=4)


def written(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {written(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def document(found: dict[str, dict[str, object]]) -> str:
    top = "".join(f"{key} = {written(value)}\n" for key, value in found.get("", {}).items())
    rest = ((table, keys) for table, keys in found.items() if table)
    return top + "".join(f"[{table}]\n" + "".join(f"{k} = {written(v)}\n" for k, v in keys.items()) for table, keys in rest)


def check(folder: Path, text: bytes) -> None:
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "instruction.md").write_text("Say hello.")
    (folder / "tests/test.sh").write_text("echo 1 > $VERIFIER_DIR/reward.txt")
    (folder / "task.toml").write_bytes(text)
    task, problems = check_task(folder)
    errors = [problem for problem in problems if problem.severity == "error"]
    assert (task is None) == bool(errors)
    num_lines = text.count(b"\n") + 1
    assert all(problem.file.endswith("task.toml") and 0 <= problem.line <= num_lines and problem.message for problem in problems)
    if task is not None:
        assert task.agent_timeout_s > 0 and task.verifier_timeout_s > 0 and task.reward_range[0] < task.reward_range[1]
        assert all(math.isfinite(value) for value in (task.agent_timeout_s, task.verifier_timeout_s, *task.reward_range))
        assert all(isinstance(value, str) for value in {**task.agent_env, **task.verifier_env}.values())


@settings(max_examples=150)
@given(found=tables)
def test_any_keys_and_values(tmp_path_factory, found):
    check(tmp_path_factory.mktemp("t"), document(found).encode())


@settings(max_examples=80)
@given(text=st.binary(max_size=60))
def test_any_bytes(tmp_path_factory, text):
    check(tmp_path_factory.mktemp("t"), text)
