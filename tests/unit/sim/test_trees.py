"""Training on trees in the simulator costs what training on trees was measured to cost."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.sim.durations import Durations
from qwengyre.sim.trees import MEASURED, tree_cost
from qwengyre.sim.workload import builtin_workloads, to_workload
from tests.arch.source import ROOT

WORKLOAD = builtin_workloads()["tb_v1"]


def test_what_was_measured_is_what_the_docs_say():
    rows = re.findall(r"^\| [^|]+ \| (\.\d+) \| (\.\d+)", (ROOT / "docs/training.md").read_text(encoding="utf-8"), re.M)
    assert sorted((float(ideal), float(chains)) for ideal, chains in rows) == list(MEASURED[:-1])


def test_cost_rises_with_what_is_distinct_and_never_beats_what_is_ideal_by_more_than_noise():
    shares = np.linspace(0.001, 1.0, 200)
    costs = [tree_cost(share) for share in shares]
    assert np.all(np.diff(costs) > 0) and costs[-1] == 1.0
    assert all(cost > 0.99 * share for cost, share in zip(costs, shares, strict=True))


def test_trees_change_the_training_and_nothing_else():
    paths, trees = Durations.draw(WORKLOAD, 0), Durations.draw(msgspec.structs.replace(WORKLOAD, distinct_share=0.688), 0)
    assert np.array_equal(paths.unloaded_GN, trees.unloaded_GN)
    assert trees.train_GN == pytest.approx(0.733 * paths.train_GN)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_no_tree_has_is_refused(share: float):
    table = {**msgspec.structs.asdict(WORKLOAD), "distinct_share": share}
    with pytest.raises(ConfigError, match="distinct_share"):
        to_workload(table, file="mine.toml")
