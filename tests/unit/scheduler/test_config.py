from __future__ import annotations

import msgspec
import pytest

from qwengyre.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_cells": 0}, "num_cells = 0 is too small"),
        ({"dispatch_depth": -0.5}, "dispatch_depth = -0.5"),
        ({"dispatch_depth": float("inf")}, "dispatch_depth must be a number"),
        ({"policy": "async", "num_cells": 2, "training_cells": 2}, "leaves nothing to roll out"),
        ({"evaluate_at_end": True}, "evaluation_group_sizes is empty"),
        ({"evaluation_group_sizes": (0,)}, "at least 1 execution"),
        ({"max_staleness": 1}, "cannot be kept with 2.5 steps"),
        ({"backlog": 1.0}, "backlog = 1 has no effect without two_way = true"),
        ({"backlog": 1.0, "two_way": True, "policy": "colocate"}, "under elastic scheduling"),
        ({"tune": True}, "tune = true needs max_staleness"),
        ({"tune": True, "policy": "colocate", "max_staleness": 4}, "policy = 'colocate' is not"),
    ],
)
def test_impossible_settings_are_refused_with_what_to_change(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**change)


def test_unknown_keys_are_refused():
    with pytest.raises(msgspec.ValidationError, match="num_cell"):
        msgspec.convert({"num_cell": 3}, SchedulerConfig)


def test_async_may_train_on_all_cells_beside_standalone_engines():
    assert SchedulerConfig(policy="async", num_cells=2, training_cells=2, num_standalone=1).training_cells == 2


@pytest.mark.parametrize(
    ("policy", "streaming", "streams"), [("elastic", None, True), ("async", None, False), ("async", True, True)]
)
def test_only_elastic_streams_unless_told(policy: str, streaming: bool | None, streams: bool):
    assert SchedulerConfig(policy=policy, streaming=streaming).streams is streams
