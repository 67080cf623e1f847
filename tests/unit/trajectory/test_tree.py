"""The tree of recorded calls: sharing, provenance, branches, and records that contradict themselves."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from qwengyre.core.errors import CallOutOfOrder, TokenCountMismatch
from qwengyre.core.records import CONTEXT_VERSION
from qwengyre.testing.call_records import call_records, opened, tree_of
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.records import BranchCause, TokensSampled
from qwengyre.trajectory.tree import TrajectoryTree


def build(*calls, **opened_with) -> TrajectoryTree:
    tree = tree_of(*calls, **opened_with)
    tree.validate()
    return tree


def outline(tree: TrajectoryTree) -> list[tuple]:
    return [(node.parent, node.token_ids.tolist(), node.spans, node.ends, node.cause, node.key) for node in tree.nodes]


def trainable(tree: TrajectoryTree) -> list[int]:
    """Token ids that may be trained, in the order of the tree."""
    return [
        int(token)
        for node in tree.nodes
        for span in node.spans
        if span.trainable
        for token in node.token_ids[span.start : span.stop]
    ]


CHAIN = (
    call_records(0, [1, 2, 3], [10, 11], at=0),
    call_records(1, [1, 2, 3, 10, 11, 4, 5], [12], at=1),
    call_records(2, [1, 2, 3, 10, 11, 4, 5, 12, 6], [13, 14], at=2),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_full_contexts_give_one_path_in_any_arrival_order(order):
    tree = build(*(CHAIN[index] for index in order))
    (node,) = tree.nodes
    assert node.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14]
    assert trainable(tree) == [10, 11, 12, 13, 14]


def test_contexts_given_by_base_and_in_full_make_the_same_tree():
    by_base = (
        call_records(0, [1, 2, 3], [10, 11], at=0),
        call_records(1, [4, 5], [12], base=0, base_tokens=5, at=1, cause=BranchCause.ROOT),
        call_records(2, [6], [13, 14], base=1, base_tokens=8, at=2, cause=BranchCause.ROOT),
    )
    assert outline(build(*by_base)) == outline(build(*CHAIN))


def test_later_root_is_trained_too():
    tree = build(*CHAIN, call_records(3, [90, 91], [7], at=3))
    assert [node.token_ids.tolist() for node in tree.nodes if node.parent < 0] == [tree.nodes[0].token_ids.tolist(), [90, 91, 7]]
    assert trainable(tree) == [10, 11, 12, 13, 14, 7]


def test_changed_history_makes_a_second_branch():
    tree = build(call_records(0, [1, 2, 3], [4, 5]), call_records(1, [1, 2, 3, 99, 5], [8], at=1))
    assert [(node.parent, node.token_ids.tolist()) for node in tree.nodes] == [(-1, [1, 2, 3]), (0, [4, 5]), (0, [99, 5, 8])]
    assert trainable(tree) == [4, 5, 8]


def test_invented_answer_is_never_trained_even_where_it_equals_another_call_elsewhere():
    tree = build(call_records(0, [1, 2], [4, 5]), call_records(1, [9, 4, 5], [6], at=1))
    assert trainable(tree) == [4, 5, 6]
    assert [span.is_sampled for span in tree.nodes[1].spans] == [False, True]


def test_equal_samples_of_two_calls_stay_siblings_and_each_is_trained():
    tree = build(
        call_records(0, [1, 2], [4, 5]),
        call_records(1, [], [4, 5], base=0, base_tokens=2, cause=BranchCause.RETRY, at=1),
    )
    assert [node.token_ids.tolist() for node in tree.nodes] == [[1, 2], [4, 5], [4, 5]]
    assert trainable(tree) == [4, 5, 4, 5]


def test_branch_inside_a_sampled_answer_splits_it_and_keeps_every_token_once():
    tree = build(
        call_records(0, [1, 2], [4, 5, 6]),
        call_records(1, [7], [8], base=0, base_tokens=4, cause=BranchCause.DIVERGES, at=1),
    )
    assert [(node.parent, node.token_ids.tolist()) for node in tree.nodes] == [(-1, [1, 2, 4, 5]), (0, [6]), (0, [7, 8])]
    logprob_T, version_T = tree.behavior_T(tree.path_of("e/c0"))
    assert logprob_T.tolist() == [0, 0, -1 / 16, -2 / 16, -3 / 16]
    assert version_T.tolist() == [CONTEXT_VERSION] * 2 + [0] * 3
    assert tree.nodes[2].cause is BranchCause.DIVERGES


def test_context_resent_without_a_base_follows_the_answer_it_repeats_longest():
    tree = build(
        call_records(0, [1], [4, 5, 6]),
        call_records(1, [], [4, 5, 7], base=0, base_tokens=1, cause=BranchCause.RETRY, at=1),
        call_records(2, [1, 4, 5, 7, 2], [3], at=2),
    )
    assert trainable(tree) == [4, 5, 6, 4, 5, 7, 3]
    spans = [span for part in tree.path_of("e/c2") for span in tree.nodes[part.node].spans]
    assert [span.call for span in spans if span.is_sampled] == ["e/c1", "e/c2"]


class TestAbandoned:
    def test_answer_that_nobody_got_is_kept_but_not_trained(self):
        tree = build(
            call_records(0, [1, 2], [4, 5], abandoned=True, reason="abort"),
            call_records(1, [], [6], base=0, base_tokens=2, cause=BranchCause.RETRY, at=1),
        )
        assert tree.num_distinct_tokens == 5
        assert trainable(tree) == [6]

    def test_answer_is_trained_as_far_as_the_client_went_on_from_it(self):
        tree = build(
            call_records(0, [1, 2], [4, 5, 6], abandoned=True, reason="abort"),
            call_records(1, [7], [8], base=0, base_tokens=4, at=1),
        )
        assert trainable(tree) == [4, 5, 8]

    def test_text_that_begins_like_it_by_chance_does_not_make_it_trainable(self):
        tree = build(
            call_records(0, [1, 2], [4, 5, 6], abandoned=True, reason="abort"),
            call_records(1, [1, 2, 4, 9], [8], at=1),
        )
        assert trainable(tree) == [8]

    def test_whole_answer_resent_without_a_base_is_recognized(self):
        tree = build(
            call_records(0, [1, 2], [4, 5, 6], abandoned=True, reason="abort"),
            call_records(1, [1, 2, 4, 5, 6, 9], [8], at=1),
        )
        assert trainable(tree) == [4, 5, 6, 8]

    def test_running_call_is_not_trained_yet(self):
        tree = tree_of(call_records(0, [1, 2], [4, 5])[:-1])
        tree.validate()
        assert trainable(tree) == []
        assert trainable(tree_of(call_records(0, [1, 2], [4, 5]))) == [4, 5]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"trainable": False}])
def test_greedy_and_untrained_executions_are_not_trained(how):
    assert trainable(build(call_records(0, [1], [2, 3]), **how)) == []


def test_versions_of_a_call_that_spans_a_publish_are_kept_per_token():
    start, *tokens, finish = call_records(0, [1], [4, 5, 6], chunk=1)
    tokens = [
        TokensSampled(0, token.call, token.token_ids, token.logprobs, version, "cell-1")
        for token, version in zip(tokens, [3, 3, 4], strict=True)
    ]
    tree = tree_of([start, *tokens, finish])
    assert tree.behavior_T(tree.path_of("e/c0"))[1].tolist() == [CONTEXT_VERSION, 3, 3, 4]


def test_empty_rows_and_empty_answers_are_no_nodes():
    tree = build(call_records(0, [], [], reason="error"), call_records(1, [1], [], at=1))
    assert tree.path_of("e/c0") == ()
    assert tree.token_ids_T(tree.path_of("e/c1")).tolist() == [1]


class TestLongChains:
    def test_eleven_hundred_calls_need_no_recursion_and_little_memory(self):
        rng = np.random.default_rng(0)
        log, length = CallLog(opened()), 0
        tracemalloc.start()
        for index in range(1100):
            context, sampled = rng.integers(0, 1000, 600), rng.integers(0, 1000, 100)
            for record in call_records(index, context, sampled, base=index - 1, base_tokens=length):
                log.apply(record)
            length += 700
        tree = TrajectoryTree(log)
        assert tree.num_distinct_tokens == length == 770_000
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tree.validate()
        assert len(tree.nodes) == 1
        assert held < 14_000_000

    def test_eleven_hundred_nested_branches_need_no_recursion(self):
        calls = [call_records(0, [0], [1])]
        for index in range(1, 1100):
            calls.append(call_records(index, [2], [1], base=index - 1, base_tokens=2 * index, at=index))
            calls.append(call_records(5000 + index, [3], [1], base=index - 1, base_tokens=2 * index, at=index))
        tree = build(*reversed(calls))
        assert len(tree.nodes) == 2 * 1099 + 1
        assert len(tree.path_of("e/c1099")) == 1100


class TestContradictions:
    def test_finish_that_counts_other_tokens(self):
        start, tokens, _ = call_records(0, [1], [2, 3])
        _, _, finish = call_records(0, [1], [2])
        with pytest.raises(CallOutOfOrder, match="finished with 1 tokens, but 2"):
            tree_of([start, tokens, finish])

    def test_log_probs_of_another_length(self):
        start, tokens, _ = call_records(0, [1], [2, 3])
        with pytest.raises(TokenCountMismatch, match="2 tokens but 1"):
            tree_of([start, TokensSampled(0, tokens.call, tokens.token_ids, tokens.logprobs[:4], 0, "cell-0")])

    @pytest.mark.parametrize("again", [0, 2])
    def test_start_or_finish_twice(self, again):
        records = call_records(0, [1], [2])
        with pytest.raises(CallOutOfOrder, match="twice"):
            tree_of([*records, records[again]])

    def test_base_that_is_unknown_or_too_short_is_left_out_and_reported(self):
        for base, base_tokens in ((9, 2), (0, 5)):
            tree = tree_of([*call_records(0, [1], [2]), *call_records(1, [3], [4], base=base, base_tokens=base_tokens)])
            tree.validate(final=False)
            with pytest.raises(CallOutOfOrder, match="e/c1"):
                tree.validate()

    def test_two_calls_that_name_each_other_as_base(self):
        tree = tree_of(
            [
                *call_records(0, [1], [2], base=1, base_tokens=1),
                *call_records(1, [1], [2], base=0, base_tokens=1),
            ]
        )
        with pytest.raises(CallOutOfOrder):
            tree.validate()


def test_what_was_sampled_after_a_stop_string_is_recorded_but_neither_trained_nor_gone_on_from():
    """The harness says the same words itself, as a ReAct harness says "Observation:": those are its own."""
    calls = (
        call_records(0, [1, 2], [10, 11, 20, 21], at=0, num_masked=2),
        call_records(1, [20, 21, 5], [12], base=0, base_tokens=4, at=1),
        call_records(2, [1, 2, 10, 11, 20, 21, 5, 12, 6], [13], at=2),
    )
    for order in itertools.permutations(calls):
        tree = build(*order)
        assert sorted(trainable(tree)) == [10, 11, 12, 13]
        assert tree.token_ids_T(tree.path_of("e/c0")).tolist() == [1, 2, 10, 11, 20, 21]
        assert tree.token_ids_T(tree.path_of("e/c2")).tolist() == [1, 2, 10, 11, 20, 21, 5, 12, 6, 13]
        after = [span for part in tree.path_of("e/c2")[1:] for span in tree.nodes[part.node].spans]
        assert "e/c0" not in {span.call for span in after}


def test_a_call_cannot_mask_more_than_it_sampled():
    with pytest.raises(CallOutOfOrder, match="3 tokens after its stop string"):
        build(call_records(0, [1], [10, 11], num_masked=3))
