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


@pytest.fixture
def replay(rendering, tmp_path):
    def run(capture: Path, name: str = "one", **options) -> tuple[Replay, TrajectoryTree]:
        order = options.pop("order", None)
        replay = Replay(capture, rendering, tmp_path / name, **options)
        tree = TrajectoryTree.build(asyncio.run(replay.run(order)).session.rows.events())
        tree.validate()
        return replay, tree

    return run


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_labels_and_tokens(capture, replay):
    """Every label is reproduced; every token that the engine made is sampled in the tree once, none that it did not."""
    played, tree = replay(capture)
    rows = played.execution.session.rows
    roles = assign_roles(tree.calls)
    told = {row["seq"]: row["label"].partition(":")[0] for row in played.rows if row["seq"] in played.calls}
    assert {seq: roles[rows[number].id].value for seq, number in played.calls.items()} == told

    for seq, number in played.calls.items():
        whole = list(played.rendering.tokenizer.encode(played.answers[seq].sampled()))
        answer = rows.answer_ids(number)
        assert answer == whole[: len(answer)]
        if not rows[number].is_abandoned:
            assert answer == whole
    sampled = sum(span.num_tokens for node in tree.nodes for span in node.spans if span.is_sampled)
    assert sampled == played.engine.stats().tokens_generated == sum(call.num_sampled for call in rows)


@pytest.mark.parametrize("name", ["claude--basic", "codex--basic", "qwen--basic", "opencode--basic"])
def test_whole_answers_give_the_records_of_streams(name, replay):
    capture = next(path for path in CAPTURES if path.name.startswith(name))
    _, streamed = replay(capture, "streamed", stream=True)
    _, whole = replay(capture, "whole", stream=False)
    assert contents(streamed) == contents(whole)


def contents(tree: TrajectoryTree) -> list:
    """A tree without the ids and times of its calls."""
    return [
        (node.parent, tree.token_ids_T(tree.segments_to(at, node.num_tokens)).tobytes()) for at, node in enumerate(tree.nodes)
    ]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("claude--basic", [[2], [3], [4], [5], [6], [7], [8], [10, 9], [12], [11], [13], [14]]),
        ("claude--nested", [[2], [4, 3], [5], [6], [7]]),
        ("qwen--basic", [[1], [2], [3], [4], [5], [7, 6], [9, 8], [10], [12, 11], [13], [14]]),
        ("codex--basic", [[1], [2], [3], [4], [5], [6], [7], [8], [10, 9], [12, 11], [14, 13], [15], [16]]),
    ],
)
def test_tree_does_not_depend_on_how_agents_interleave(name, order, replay):
    capture = next(path for path in CAPTURES if path.name.startswith(name))
    _, in_turn = replay(capture, "turn")
    _, at_once = replay(capture, "once", order=order)
    assert sorted(contents(in_turn)) == sorted(contents(at_once))
    assert contents(in_turn) == contents(at_once)
