"""Which paths are drawn, how often, and what they train."""

from __future__ import annotations

from collections import Counter

import numpy as np

from qwengyre.core.arrays import FLAG, unpack
from qwengyre.core.records import Role
from qwengyre.testing.call_records import PLAIN, call_records, tree_of
from qwengyre.trajectory.paths import candidate_paths
from qwengyre.trajectory.records import RoleHints
from qwengyre.trajectory.roles import assign_roles
from qwengyre.trajectory.sampling import sample_trajectories

SUB = RoleHints("chat", system_digest="sub", num_tools=1)
TITLE = RoleHints("chat", system_digest="title")


def choose(calls, j_max=None, seed=0, temperature=1.0):
    tree = tree_of(*calls, temperature=temperature)
    return sample_trajectories(tree, assign_roles(tree.calls), j_max=j_max, rng=np.random.default_rng(seed))


def num_trained(trajectory) -> int:
    return int(unpack(trajectory.trainable_T, FLAG).sum())


THREE_BRANCHES = (
    call_records(0, [1], list(range(10, 20))),
    call_records(1, [2], [3] * 10, base=0, base_tokens=11, at=1),
    call_records(2, [4], [5] * 20, base=0, base_tokens=11, at=2),
    call_records(3, [6], [7] * 40, base=0, base_tokens=11, at=3),
)


def test_first_path_is_drawn_in_proportion_to_its_unmasked_trainable_tokens():
    drawn = Counter(choose(THREE_BRANCHES, j_max=1, seed=seed)[0].num_tokens for seed in range(6000))
    shares = {num_tokens: count / 6000 for num_tokens, count in drawn.items()}
    for num_tokens, weight in ((22, 20), (32, 30), (52, 50)):
        assert abs(shares[num_tokens] - weight / 100) < 0.02


def test_second_draw_counts_only_what_the_first_left_unmasked():
    second = Counter()
    for seed in range(6000):
        first, then = choose(THREE_BRANCHES, j_max=2, seed=seed)
        if first.num_tokens == 52:
            second[then.num_tokens] += 1
    total = sum(second.values())
    assert abs(second[22] / total - 10 / 30) < 0.03
    assert abs(second[32] / total - 20 / 30) < 0.03


def test_shared_targets_are_trained_by_the_first_path_only():
    chosen = choose(THREE_BRANCHES)
    assert len(chosen) == 3
    assert sorted(num_trained(trajectory) for trajectory in chosen[1:]) == sorted(
        trajectory.num_tokens - 12 for trajectory in chosen[1:]
    )
    assert sum(map(num_trained, chosen)) == 80


def test_cap_bounds_the_number_of_trajectories():
    assert len(choose(THREE_BRANCHES, j_max=2)) == 2


def test_main_goes_before_sub_agents_and_side_calls_never_go():
    chosen = choose(
        (
            call_records(0, [1], [2], hints=PLAIN),
            call_records(1, [3], [4] * 500, hints=SUB, at=1),
            call_records(2, [5], [6] * 5, hints=TITLE, at=2),
        )
    )
    assert [(trajectory.role, num_trained(trajectory)) for trajectory in chosen] == [(Role.MAIN, 1), (Role.SUB_AGENT, 500)]


def test_side_call_that_repeats_main_history_does_not_carry_its_path():
    calls = (
        call_records(0, [1], [2, 3], hints=PLAIN),
        call_records(1, [8], [9], base=0, base_tokens=3, hints=TITLE, at=1),
    )
    tree = tree_of(*calls)
    (path,) = candidate_paths(tree, assign_roles(tree.calls))
    assert (path.role, path.num_tokens) == (Role.MAIN, 3)


def test_path_ends_at_its_last_trainable_token():
    calls = (
        call_records(0, [1], [2, 3]),
        call_records(1, [8, 8, 8], [9], base=0, base_tokens=3, abandoned=True, reason="abort", at=1),
    )
    (trajectory,) = choose(calls)
    assert trajectory.num_tokens == 3


def test_same_seed_gives_the_same_choice():
    assert choose(THREE_BRANCHES, j_max=2, seed=7) == choose(THREE_BRANCHES, j_max=2, seed=7)


def test_nothing_to_train_gives_nothing():
    assert choose((call_records(0, [1], [2]),), temperature=0.0) == ()
