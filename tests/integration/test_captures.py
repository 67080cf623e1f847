"""Every recorded harness, replayed: labels, tokens, matches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.capture_replay import Replay
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

CAPTURES = sorted((Path(__file__).parent.parent / "captures").glob("*.jsonl.gz"))


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering.from_folder(
        write_byte_tokenizer(tmp_path_factory.mktemp("model")), {"name": "qwen3", "thinking_retention": "all"}
    )


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_every_label_is_reproduced(capture, rendering, tmp_path):
    replay = Replay(capture, rendering, tmp_path)
    execution = asyncio.run(replay.run())
    tree = TrajectoryTree.build(execution.session.rows.events())
    tree.validate()
    roles = assign_roles(tree.calls)
    rows = execution.session.rows
    told = {row["seq"]: row["label"].partition(":")[0] for row in replay.rows if row["seq"] in replay.calls}
    found = {seq: roles[rows[number].id].value for seq, number in replay.calls.items()}
    assert found == told
