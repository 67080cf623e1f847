from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from qwengyre.config.dump import dump_toml, explain
from qwengyre.config.load import load, loads, reads
from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest
from qwengyre.runtime.run_config import RunConfig
from qwengyre.sandbox.config import LimitsConfig


class Window(msgspec.Struct, frozen=True):
    low: float = 0.995
    """Lower end."""
    high: float = 1.005

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, not {self.low}")


class Scheduler(msgspec.Struct, frozen=True):
    phi: int = 1
    """Groups dispatched ahead,
    in steps."""
    policy: Literal["elastic", "colocate", "async"] = "elastic"
    """Who decides."""
    window: Window = Window()
    weights: dict[str, float] = {}
    nodes: tuple[int, ...] = (1, 2)


class Local(msgspec.Struct, frozen=True, tag="local", tag_field="kind"):
    workers: int = 2


class Cluster(msgspec.Struct, frozen=True, tag="cluster", tag_field="kind"):
    address: str


class Run(msgspec.Struct, frozen=True):
    name: str
    """What to call it."""
    scheduler: Scheduler = Scheduler()
    launcher: Local | Cluster = Local()
    limit_s: float | None = None


def error_of(text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        loads(text, Run, overrides, file="run.toml")
    return raised.value


def test_defaults_file_and_overrides_in_this_order():
    run = loads('name = "a"\n[scheduler]\nphi = 3\nwindow.low = 0.5', Run, ["scheduler.phi=4", "scheduler.policy=async"])
    assert run == Run(name="a", scheduler=Scheduler(phi=4, policy="async", window=Window(low=0.5)))


def test_an_override_makes_its_table():
    assert loads('name = "a"', Run, ["scheduler.nodes=[3]", "name=other"]) == Run(name="other", scheduler=Scheduler(nodes=(3,)))


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ('name = "a"\n[scheduler]\nphj = 3', (), "run.toml:3: scheduler.phj: no such key. Did you mean scheduler.phi?"),
        ('name = "a"\nphi = 3', (), "run.toml:2: phi: no such key. Did you mean scheduler.phi?"),
        ('name = "a"\n[sheduler]\nphi = 3', (), "run.toml:2: sheduler: no such key. Did you mean scheduler?"),
        ('name = "a"', ("scheduler.phj=3",), "--set scheduler.phj=3: scheduler.phj: no such key. Did you mean scheduler.phi?"),
        (
            'name = "a"\n[scheduler.window]\nzzz = 3',
            (),
            "run.toml:3: scheduler.window.zzz: no such key. [scheduler.window] knows: low, high",
        ),
        (
            'name = "a"\n[launcher]\nkind = "local"\nworker = 1',
            (),
            "run.toml:4: launcher.worker: no such key. Did you mean launcher.workers?",
        ),
        ('name = "a"\n[scheduler]\nphi = "3"', (), "run.toml:3: scheduler.phi: expected int, got '3' (str)"),
        ('name = "a"\n[scheduler]\nphi = 1.5', (), "run.toml:3: scheduler.phi: expected int, got 1.5 (float)"),
        ('name = "a"\nlimit_s = "long"', (), "run.toml:2: limit_s: expected float or nothing, got 'long' (str)"),
        (
            'name = "a"\n[scheduler]\n\npolicy = "elastik"',
            (),
            "run.toml:4: scheduler.policy: expected one of 'async', 'colocate', 'elastic', got 'elastik' (str). Did you mean 'elastic'?",
        ),
        ('name = "a"\n[scheduler]\nnodes = [1, "b"]', (), "run.toml:3: scheduler.nodes: expected int, got"),
        ('name = "a"\nscheduler = 3', (), "run.toml:2: scheduler: expected table (phi, policy"),
        ("[scheduler]\nphi = 3", (), "run.toml: name: this key is missing and has no default"),
        ('name = "a"\n[launcher]\nkind = "cluster"', (), "run.toml:2: launcher.address: this key is missing and has no default"),
        ('name = "a"\n[launcher]\nkind = "moon"', (), "run.toml:3: launcher.kind:"),
        (
            'name = "a"\n[scheduler.window]\nhigh = 0.5\nlow = 0.6',
            (),
            "run.toml:4: scheduler.window.low: low must be below high, not 0.6",
        ),
        ('name = "a"', ("scheduler.window.low=2",), "--set scheduler.window.low=2: scheduler.window.low: low must be below high"),
        ("name = ", (), "run.toml:1: not valid TOML: Invalid value"),
        ('name = "a"\nname = "b"', (), "run.toml:2: not valid TOML: Cannot overwrite a value"),
        ('name = "a"', ("scheduler",), "--set scheduler: write it as table.key=value"),
        ('name = "a"', ("name.x=1",), "--set name.x=1: name.x: name is a value, not a table"),
        ('name = "a"', ("scheduler.phi.x=1",), "--set scheduler.phi.x=1: scheduler.phi: expected int, got a table"),
    ],
)
def test_bad_input_says_where_what_and_what_instead(text: str, overrides: tuple[str, ...], message: str):
    assert str(error_of(text, *overrides)).startswith(message)


def all_of(text: str, *overrides: str) -> list[str]:
    return str(error_of(text, *overrides)).splitlines()


def test_all_mistakes_are_told_at_once_and_none_hides_another():
    text = """
nane = "a"
limit_s = "long"
[scheduler]
phi = "3"
policy = "elastik"
weights = { a = "x", b = 1.0, "c d" = [] }
nodes = [1, "b", 2.5]
[scheduler.window]
low = 2
hihg = 1
[launcher]
kind = "moon"
"""
    assert all_of(text, "scheduler", "scheduler.zzz=1") == [
        "--set scheduler: write it as table.key=value, for instance scheduler.steps=20",
        "run.toml:2: nane: no such key. Did you mean name?",
        "run.toml:3: limit_s: expected float or nothing, got 'long' (str)",
        "run.toml:5: scheduler.phi: expected int, got '3' (str)",
        "run.toml:6: scheduler.policy: expected one of 'async', 'colocate', 'elastic', got 'elastik' (str). Did you mean 'elastic'?",
        "run.toml:7: scheduler.weights.a: expected float, got 'x' (str)",
        "run.toml:7: scheduler.weights.c d: expected float, got [] (list)",
        "run.toml:8: scheduler.nodes: expected int, got 'b' (str)",
        "run.toml:8: scheduler.nodes: expected int, got 2.5 (float)",
        "run.toml:11: scheduler.window.hihg: no such key. Did you mean scheduler.window.high?",
        "run.toml:10: scheduler.window.low: low must be below high, not 2.0",
        "--set scheduler.zzz=1: scheduler.zzz: no such key. [scheduler] knows: phi, policy, window, weights, nodes",
        "run.toml:13: launcher.kind: expected one of 'local', 'cluster', got 'moon' (str)",
        "run.toml: name: this key is missing and has no default",
    ]


def test_what_is_right_is_there_beside_what_is_wrong():
    reading = reads('name = "a"\n[scheduler]\nphi = "3"\nnodes = [7]\nzzz = 1', Run)
    assert reading.value == Run(name="a", scheduler=Scheduler(nodes=(7,))) and len(reading.mistakes) == 2
    assert reads("name = 3", Run).value is None


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("elastik", ("elastic", "async"), "elastic"),
        ("bfloat16", ("float32", "float64"), None),
        ("float16", ("float32", "float64"), None),
        ("beta", ("beta1", "gamma2"), "beta1"),
        ("beta3", ("beta1", "beta2"), None),
        ("Steps", ("steps",), "steps"),
        ("qwen2", ("qwen3",), None),
    ],
)
def test_the_nearest_word_is_a_misspelt_one_and_never_another_number(word: str, known: tuple[str, ...], found: str | None):
    assert nearest(word, known) == found


def test_an_error_has_its_parts_as_fields():
    error = error_of('name = "a"\n[scheduler]\nphj = 3')
    assert (error.file, error.line, error.key) == ("run.toml", 3, "scheduler.phj")


def test_a_missing_file_and_a_binary_file_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot read this file \(No such file"):
        load(tmp_path / "absent.toml", Run)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "b.toml", Run)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path):
    (tmp_path / "run.toml").write_text('name = "a"', encoding="utf-8-sig")
    assert load(tmp_path / "run.toml", Run) == Run(name="a")


def test_the_dump_loads_back_to_the_same_config():
    run = Run(
        name='odd "name"\twith\\all\x7f é 🙂',
        scheduler=Scheduler(weights={"a b": 1e-6, "c": float("inf"), 'q"': -0.0}, nodes=()),
        launcher=Cluster(address="host"),
        limit_s=0.1,
    )
    assert loads(dump_toml(run), Run) == run
    assert loads(dump_toml(Run(name="a")), Run) == Run(name="a")


def test_explain_shows_every_key_with_docstring_type_and_default():
    text = explain(Run)
    assert "# What to call it. (str)\n# name =            must be given" in text
    assert "[scheduler]\n# Groups dispatched ahead, in steps. (int)\n# phi = 1" in text
    assert "[scheduler.window]\n# Lower end. (float)\n# low = 0.995" in text
    assert "name" not in explain(Run, "scheduler.window")


@pytest.mark.parametrize(
    ("only", "found"),
    [
        ("scheduler.steps", ["scheduler.steps"]),
        ("steps", ["scheduler.steps"]),
        ("ray", ["ray.address", "ray.ranks_per_node", "ray.cell.cpus", "ray.cell.gpus"]),
        ("max_context_tokens", ["policy.max_context_tokens", "gateway.max_context_tokens", "engine.max_context_tokens"]),
        ("harness.limits", [f"harness.limits.{name}" for name in LimitsConfig.__struct_fields__]),
    ],
)
def test_explain_finds_tables_and_single_keys(only: str, found: list[str]):
    table, listed = "", []
    for line in explain(RunConfig, only).splitlines():
        table = line.strip("[]") if line.startswith("[") else table
        if " = " in line and line.startswith("# ") and line[2:].split(" = ")[0].isidentifier():
            listed.append(f"{table}.{line[2:].split(' = ')[0]}")
    assert set(found) <= set(listed) and all(only in name for name in listed)


@pytest.mark.parametrize(
    ("only", "hint"),
    [
        ("scheduler.step", "Did you mean scheduler.steps?"),
        ("schedular", "Did you mean scheduler?"),
        ("learning_rat", "Did you mean learning_rate?"),
        ("optimizer.learning_rate", "Did you mean trainer.learning_rate?"),
        ("zzzz", "the tables are: tasks, harness, sandbox, runtime"),
    ],
)
def test_explain_names_near_misses(only: str, hint: str):
    with pytest.raises(ConfigError, match=re.escape(hint)) as raised:
        explain(RunConfig, only)
    assert raised.value.key == only


def test_explain_opens_each_table_once_so_that_its_lines_can_be_taken_as_they_are():
    headers = [line for line in explain(RunConfig).splitlines() if line.startswith("[")]
    assert len(headers) == len(set(headers))
    assert "[ray]" in headers and "[ray.cell]" in headers
