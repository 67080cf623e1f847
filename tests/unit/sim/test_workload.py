from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from qwengyre.config.shape import Key, keys
from qwengyre.core.errors import ConfigError
from qwengyre.sim.durations import Durations
from qwengyre.sim.settings import Setting, build
from qwengyre.sim.workload import Workload, builtin_workloads, load_workload

GOOD = msgspec.structs.asdict(builtin_workloads()["nl122_v1"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overall_timeout_h": -1}, "overall_timeout_h = -1.0 must be above zero"),
        ({"cell_nodes": 5}, r"cells of 5 nodes do not divide 32 nodes: set cell_nodes to one of \[1, 2, 4, 8, 16, 32\]"),
        ({"slots_per_node": 0.3}, "32 nodes in cells of 4 serve 8 executions at once, but one group has 16: raise nodes"),
        ({"slots_per_node": 0.0}, "slots_per_node = 0.0 must be above zero"),
        ({"steps": 0}, "steps = 0 must be at least 1"),
        ({"decode_share": 1.5}, "decode_share = 1.5 is a share: at most 1"),
        ({"slowdown": 0.5}, "a loaded server is not faster"),
        ({"publish_s": -3}, "publish_s = -3.0 must not be below zero"),
        ({"median_h": "long"}, "median_h"),
        ({"sigma_query": 1e6}, r"sigma_query = 1e\+06 is the standard deviation of a log-duration .* at most 5"),
        ({"median_h": 1e-30}, "median_h = 1e-30 is below 1e-09: is its unit right"),
        ({"publish_s": 1e300}, r"publish_s = 1e\+300 is beyond 1e\+09: is its unit right"),
        ({"dispatch_depth": 10**400}, "dispatch_depth"),
        ({"steps": 10**12}, "executions are more than the 20000000 that are simulated: lower steps"),
        ({"micro_steps_per_group": 10**9}, "micro-steps are more than .* lower steps, groups_per_step or micro_steps_per_group"),
        ({"nodes": 10**15}, "nodes = 1000000000000000 is beyond 10000000"),
        ({"steps_per_burst": 10**400}, "steps_per_burst = 10+ is beyond"),
        ({"medain_h": 1.0}, r"medain_h: no such key\. Did you mean median_h\?"),
        ({"gpus": 8}, r"gpus: no such key\. A workload knows: steps, groups_per_step"),
    ],
)
def test_impossible_workloads_are_refused_with_file_and_what_to_change(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_workload(str(path))
    assert str(path) in str(caught.value)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('steps = "three"\nmedain_h = 1.0\noptimizer_s = true\n')
    with pytest.raises(ConfigError) as caught:
        load_workload(str(path))
    said = str(caught.value)
    given = {"steps", "optimizer_s"}
    required = {key.path[0] for key in keys(Workload) if key.default is msgspec.NODEFAULT}
    for key in required - given:
        assert f"{path}: {key}: this key is missing and has no default" in said
    assert f"{path}: steps: expected int, got 'three' (str)" in said
    assert f"{path}: medain_h: no such key. Did you mean median_h?" in said
    assert f"{path}: optimizer_s: expected float, got True (bool)" in said
    assert len(caught.value.mistakes) == len(required - given) + 3


def test_one_of_several_workloads_is_named_with_its_keys(tmp_path: Path):
    path = tmp_path / "several.json"
    path.write_text(json.dumps({"workloads": {"a": GOOD, "b": {**GOOD, "steps": None, "nodes": "x"}}}))
    with pytest.raises(ConfigError) as caught:
        load_workload(f"{path}:b")
    assert [mistake.key for mistake in caught.value.mistakes] == ["b.steps", "b.nodes"]


def test_the_docs_list_every_key_of_a_workload():
    docs = (Path(__file__).parents[3] / "docs" / "reading-a-simulation.md").read_text()
    rows = [line for line in docs.splitlines() if line.startswith("| `")]
    assert rows == [row_of(key) for key in keys(Workload)]


def row_of(key: Key) -> str:
    default = "must be given" if key.default is msgspec.NODEFAULT else "none" if key.default is None else f"{key.default:g}"
    return f"| `{key.path[0]}` | {key.kind} | {default} | {key.doc} |"


def test_one_of_several_is_named_after_a_colon(tmp_path: Path):
    path = tmp_path / "several.json"
    path.write_text(json.dumps({"workloads": {"a": GOOD, "b": {**GOOD, "steps": 5}}}))
    assert load_workload(f"{path}:b") == ("b", msgspec.convert({**GOOD, "steps": 5}, Workload))
    with pytest.raises(ConfigError, match=r"holds several workloads: write .*:NAME with one of a, b"):
        load_workload(str(path))
    with pytest.raises(ConfigError, match="has no workload 'c'"):
        load_workload(f"{path}:c")


def test_toml_and_built_in_workloads_are_read(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in GOOD.items() if value is not None))
    assert load_workload(str(path)) == ("mine", builtin_workloads()["nl122_v1"])
    assert load_workload("tb_v1") == ("tb_v1", builtin_workloads()["tb_v1"])


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"nl122_v1"'])
def test_files_that_are_no_workload_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_workload(str(path))


def test_missing_file_names_the_built_in_ones():
    with pytest.raises(ConfigError, match="nl122_v1, nl122_v2"):
        load_workload("nowhere.json")


def test_durations_are_common_random_numbers_with_the_workloads_moments():
    workload = msgspec.structs.replace(builtin_workloads()["tb_v1"], steps=400)
    one, two = Durations.draw(workload, 3), Durations.draw(workload, 3)
    assert np.array_equal(one.unloaded_GN, two.unloaded_GN)
    assert not np.array_equal(one.unloaded_GN, Durations.draw(workload, 4).unloaded_GN)
    logs = np.log(one.unloaded_GN / 3600)
    assert np.exp(np.median(logs)) == pytest.approx(workload.median_h, rel=0.03)
    mean_h = workload.median_h * np.exp((workload.sigma_query**2 + workload.sigma_execution**2) / 2)  # of a log-normal
    assert one.unloaded_GN.mean() / 3600 == pytest.approx(mean_h, rel=0.03)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(workload.sigma_execution, rel=0.05)
    assert one.train_GN.sum() / 3600 == pytest.approx(workload.train_node_hours_per_step * workload.steps)


def test_dropped_executions_make_no_training():
    workload = builtin_workloads()["tb_v1"]
    durations = Durations.draw(workload, 0)
    assert len(durations.micro_steps_s(5, [])) == workload.micro_steps_per_group
    assert sum(durations.micro_steps_s(5, [])) == pytest.approx(durations.train_GN[5].sum())
    assert sum(durations.micro_steps_s(5, [0, 2])) == pytest.approx(
        durations.train_GN[5].sum() - durations.train_GN[5][[0, 2]].sum()
    )
    assert sum(durations.micro_steps_s(5, range(workload.executions_per_group))) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting(policy="async", training_nodes=6), "training_nodes = 6 must be a multiple of 4"),
        (Setting(policy="async", training_nodes=32), "above 0 and below 32"),
        (Setting(policy="colocate-standalone"), "needs standalone_nodes above 0"),
        (Setting(standalone_nodes=3), "cells of 4 nodes do not divide the 29 nodes"),
        (Setting(policy="colocate", standalone_nodes=32), "standalone_nodes = 32 must be below the 32 nodes of the pool"),
        (Setting(max_staleness=1), "cannot be kept"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: Setting, message: str):
    with pytest.raises(ValueError, match=message):
        build(builtin_workloads()["nl122_v1"], setting)


def test_colocate_is_one_cell_of_all_nodes():
    config, pool = build(builtin_workloads()["nl122_v1"], Setting(policy="colocate-standalone", standalone_nodes=12))
    assert (config.num_cells, pool.cell_nodes, config.slots_per_cell) == (1, 20, 293)
    assert (config.num_standalone, config.slots_per_standalone, config.streams) == (1, 176, False)
