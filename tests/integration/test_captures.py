"""Every recorded harness, replayed: labels, tokens, matches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.capture_replay import Replay
from qwengyre.testing.capture_variations import asked_twice, bare, cut_before, rewritten
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.tree import TrajectoryTree

TOLD_IN_HEADERS = ("codex--basic", "codex--compact", "opencode--basic")
"""Here nothing but a header tells a sub-agent or a summary from the main agent."""
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
        tree = TrajectoryTree(asyncio.run(replay.run(order)).session.calls)
        tree.validate()
        return replay, tree

    return run


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_labels_and_tokens(capture, replay):
    """Every label is reproduced; every token that the engine made is sampled in the tree once, none that it did not."""
    played, tree = replay(capture)
    calls = played.execution.session.calls
    assert labels(played, tree) == told_labels(played)

    for seq, number in played.calls.items():
        whole = list(played.rendering.tokenizer.encode(played.answers[seq].sampled()))
        answer = calls.answer_ids(number)
        assert answer == whole[: len(answer)]
        if not calls[number].is_abandoned:
            assert answer == whole
    sampled = sum(span.num_tokens for node in tree.nodes for span in node.spans if span.is_sampled)
    assert sampled == played.engine.stats().tokens_generated == sum(call.num_sampled for call in calls)


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_another_way_to_write_the_same_gives_the_same_tree(capture, replay):
    _, plain = replay(capture, "plain")
    played, varied = replay(capture, "varied", vary=rewritten(1))
    assert contents(varied) == contents(plain)
    assert labels(played, varied) == told_labels(played)


@pytest.mark.parametrize("vary", [bare, cut_before, asked_twice])
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name.partition(".")[0])
def test_labels_hold_without_headers_and_through_cuts_and_lost_answers(capture, vary, replay):
    played, tree = replay(capture, vary=vary)
    if vary is not bare or capture.name.partition(".")[0] not in TOLD_IN_HEADERS:
        assert labels(played, tree) == told_labels(played)
    sampled = sum(span.num_tokens for node in tree.nodes for span in node.spans if span.is_sampled)
    assert sampled == played.engine.stats().tokens_generated
    if vary is cut_before:
        assert played.gateway.stats.calls_joined > 0


@pytest.mark.parametrize("name", ["claude--basic", "codex--basic", "qwen--basic", "opencode--basic"])
def test_whole_answers_give_the_records_of_streams(name, replay):
    capture = next(path for path in CAPTURES if path.name.startswith(name))
    _, streamed = replay(capture, "streamed", stream=True)
    _, whole = replay(capture, "whole", stream=False)
    assert contents(streamed) == contents(whole)


def labels(played: Replay, tree: TrajectoryTree) -> dict[float, str]:
    roles = assign_roles(tree.calls)
    return {seq: roles[played.execution.session.calls[number].id].value for seq, number in played.calls.items()}


def told_labels(played: Replay) -> dict[float, str]:
    return {row["seq"]: row["label"].partition(":")[0] for row in played.rows if row["seq"] in played.calls}


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
