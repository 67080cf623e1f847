"""Random executions against plain lists: every token once, in its place, with its origin, in any interleaving."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.core.arrays import FLAG, LOGPROB, TOKEN, VERSION, unpack
from qwengyre.core.records import ROLE_PRIORITY, Role
from qwengyre.testing.call_records import opened, tree_of
from qwengyre.testing.random_calls import interleave, random_execution
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.paths import candidate_paths, is_target, num_targets
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.sampling import sample_trajectories
from qwengyre.trajectory.tree import TrajectoryTree

executions = st.builds(
    lambda seed, num_calls, num_words: random_execution(np.random.default_rng(seed), num_calls, num_words=num_words),
    st.integers(0, 2**32),
    st.integers(1, 14),
    st.integers(1, 6),
)
EXECUTION = "e000000-0"
seeds = st.integers(0, 2**32)


def in_order(calls) -> TrajectoryTree:
    return tree_of(*(call.records for call in calls), execution=EXECUTION)


def outline(tree: TrajectoryTree) -> list[tuple]:
    return [
        (node.parent, node.key, node.cause, node.token_ids.tolist(), node.spans, node.children, node.ends) for node in tree.nodes
    ]


@given(executions, seeds)
def test_interleaving_does_not_matter(calls, seed):
    tree = tree_of(interleave(calls, np.random.default_rng(seed)), execution=EXECUTION)
    tree.validate()
    assert outline(tree) == outline(in_order(calls))


@given(executions, seeds)
def test_tree_read_after_every_record_is_valid_and_ends_the_same(calls, seed):
    log = CallLog(opened(EXECUTION))
    for record in interleave(calls, np.random.default_rng(seed)):
        log.apply(record)
        tree = TrajectoryTree(log)
        tree.validate(final=False)
    assert outline(tree) == outline(in_order(calls))


@given(executions)
def test_sequences_read_back_token_by_token_with_their_origin(calls):
    tree = in_order(calls)
    for call in calls:
        path = tree.path_of(call.call)
        assert tree.token_ids_T(path).tolist() == call.sequence
        own = [
            (node.depth + span.start + index, span.first_sampled + index)
            for node in (tree.nodes[part.node] for part in path)
            for span in node.spans
            if span.is_sampled and span.call == call.call
            for index in range(span.num_tokens)
        ]
        assert own == [(len(call.prompt) + index, index) for index in range(len(call.sampled))]
        logprob_T, _ = tree.behavior_T(path)
        assert logprob_T[len(call.prompt) :].tolist() == [-(index + 1) / 16 for index in range(len(call.sampled))]


@given(executions)
def test_every_sampled_token_stands_once_and_is_trainable_iff_the_client_has_it(calls):
    tree = in_order(calls)
    tree.validate()
    passed: dict[tuple[int, int], set[str]] = {}
    for call in calls:
        for part in tree.path_of(call.call):
            for index in range(part.num_tokens):
                passed.setdefault((part.node, index), set()).add(call.call)
    by_name = {call.call: call for call in calls}
    for node in tree.nodes:
        for span in node.spans:
            for index in range(span.start, span.stop):
                call = by_name[span.call]
                is_gone_on_from = passed[node.node, index] != {call.call}
                is_masked = span.first_sampled + index - span.start >= len(call.sampled) - call.num_masked
                assert not (is_masked and span.is_sampled and is_gone_on_from)
                was_seen = span.is_sampled and not is_masked and (call.was_answered or is_gone_on_from)
                assert span.trainable == was_seen


@given(executions)
def test_siblings_that_begin_with_one_token_are_samples_of_different_calls(calls):
    tree = in_order(calls)
    children = [[node for node in tree.nodes if node.parent == parent] for parent in range(-1, len(tree.nodes))]
    for siblings in children:
        first: dict[int, list] = {}
        for node in siblings:
            first.setdefault(int(node.token_ids[0]), []).append(node.spans[0])
        for spans in first.values():
            sampled_by = [span.call for span in spans if span.is_sampled]
            assert len(spans) - len(sampled_by) <= 1
            assert len(set(sampled_by)) == len(sampled_by)


@given(executions)
def test_tree_never_holds_more_than_the_record(calls):
    assert in_order(calls).num_distinct_tokens <= sum(
        len(record.context_ids) // 4 for call in calls for record in call.records[:1]
    ) + sum(len(call.sampled) for call in calls)


@given(executions, seeds)
def test_without_a_cap_every_target_is_trained_exactly_once(calls, seed):
    tree = in_order(calls)
    roles = assign_roles(tree.calls)
    chosen = sample_trajectories(tree, roles, j_max=None, rng=np.random.default_rng(seed))
    trained: dict[tuple[int, int], int] = {}
    for trajectory in chosen:
        trainable_T = unpack(trajectory.trainable_T, FLAG)
        assert trainable_T[-1]
        position = 0
        for part in trajectory.segments:
            for index in np.flatnonzero(trainable_T[position : position + part.num_tokens]):
                trained[part.node, int(index)] = trained.get((part.node, int(index)), 0) + 1
            position += part.num_tokens
    targets = {
        (node.node, index)
        for node in tree.nodes
        for span in node.spans
        if is_target(span, roles)
        for index in range(span.start, span.stop)
    }
    assert trained == dict.fromkeys(targets, 1)
    assert len(targets) == sum(num_targets(tree, roles))


@given(executions, seeds, st.integers(1, 4))
def test_chosen_trajectories_are_bounded_whole_paths_in_order_of_priority(calls, seed, j_max):
    tree = in_order(calls)
    roles = assign_roles(tree.calls)
    chosen = sample_trajectories(tree, roles, j_max=j_max, rng=np.random.default_rng(seed))
    assert len(chosen) <= j_max
    priority = [ROLE_PRIORITY.index(trajectory.role) for trajectory in chosen]
    paths = {path.segments: path for path in candidate_paths(tree, roles)}
    assert priority == sorted(priority)
    for trajectory in chosen:
        path = paths[trajectory.segments]
        logprob_T, version_T = tree.behavior_T(path.segments)
        assert unpack(trajectory.token_ids_T, TOKEN).tolist() == tree.token_ids_T(path.segments).tolist()
        assert unpack(trajectory.logprob_T, LOGPROB).tolist() == logprob_T.tolist()
        assert unpack(trajectory.version_T, VERSION).tolist() == version_T.tolist()


@given(executions)
@settings(max_examples=50)
def test_no_path_ends_in_a_side_call(calls):
    tree = in_order(calls)
    roles = assign_roles(tree.calls)
    assert all(path.role is not Role.SIDE for path in candidate_paths(tree, roles))
