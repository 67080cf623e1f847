"""The plan of who reads a snapshot from whom: bounded copies from every holder, whoever dies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.transfer.api import Exposure
from qwengyre.transfer.tree import ReaderTree

ROOT = Exposure("tcp", "core", (), 7, 0, 100)


def held_by(reader: int) -> Exposure:
    return Exposure("tcp", f"cell {reader}", (), 7, 0, 100)


def rounds(num_readers: int, fanout: int) -> tuple[int, Counter[str]]:
    """All read as soon as they may, a read takes a round: how many rounds that are, and how often each holder has sent."""
    tree, waiting, sent, number = (
        ReaderTree(ROOT, 0, fanout=fanout, num_readers=num_readers),
        list(range(1, num_readers + 1)),
        Counter(),
        0,
    )
    while waiting:
        number += 1
        taken = {reader: source for reader in waiting if (source := tree.take(reader)) is not None}
        assert taken, "somebody may always read, or is reading"
        for reader, source in taken.items():
            sent[source.exposure.location] += 1
            if source.serves_on:
                tree.holds(reader, held_by(reader))
            tree.has_read(reader)
        waiting = [reader for reader in waiting if reader not in taken]
    return number, sent


def test_fifty_cells_read_and_the_core_sends_two_copies():
    number, sent = rounds(50, 2)
    assert sent["core"] == 2 and max(sent.values()) == 2 and sent.total() == 50
    assert number == 5, "2 + 4 + 8 + 16 + 20: the depth grows as the logarithm of the cells"
    assert len(sent) == 25, "no cell holds it for others without being needed"


@pytest.mark.parametrize("num_readers", [1, 2, 3, 199])
@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_no_holder_sends_more_than_its_share(num_readers: int, fanout: int):
    _, sent = rounds(num_readers, fanout)
    assert max(sent.values()) <= fanout and sent.total() == num_readers


def test_without_a_bound_all_read_from_the_core():
    assert rounds(50, 0) == (1, Counter({"core": 50}))


def test_the_owner_reads_what_it_has_and_takes_nobody_s_place():
    tree = ReaderTree(ROOT, 3, fanout=2, num_readers=9)
    assert tree.take(3) == (ROOT, False)
    assert tree.sent == {3: 0}


def test_a_reader_that_dies_in_the_middle_gives_its_place_back_and_its_children_attach_elsewhere():
    tree = ReaderTree(ROOT, 0, fanout=2, num_readers=6)
    first, second = tree.take(1), tree.take(2)
    assert first.serves_on and second.serves_on and tree.take(3) is None
    tree.lost(1)
    assert tree.take(3) == (ROOT, True), "the place of the one that died"
    tree.holds(2, held_by(2))
    assert [tree.take(reader).exposure for reader in (4, 5)] == [held_by(2)] * 2
    tree.broke(4)
    assert tree.take(6) is None and tree.take(4) is None, "who did not send is asked no more; another one is under way"
    tree.holds(3, held_by(3))
    assert {tree.take(reader).exposure for reader in (4, 6)} == {held_by(3)}


def test_when_nobody_is_left_who_may_send_the_core_sends_once_more():
    tree = ReaderTree(ROOT, 0, fanout=1, num_readers=2)
    assert tree.take(1).serves_on
    tree.holds(1, held_by(1))
    tree.take(2)
    tree.broke(2)
    assert tree.take(2).exposure == ROOT


def test_when_a_holder_died_another_one_sends_once_more_and_not_the_core():
    tree = ReaderTree(ROOT, 0, fanout=1, num_readers=3)
    for reader in (1, 2):
        assert tree.take(reader).serves_on
        tree.holds(reader, held_by(reader))
    assert tree.take(3).exposure == held_by(2)
    tree.broke(3)
    assert tree.take(3).exposure == held_by(1)
    assert tree.sent[0] == 1


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_everybody_reads_in_the_end_whoever_dies_on_the_way(num_readers: int, fanout: int, seed: int):
    rng = np.random.default_rng(seed)
    tree = ReaderTree(ROOT, 0, fanout=fanout, num_readers=num_readers)
    left, reading, have, deaths = set(range(1, num_readers + 1)), {}, set(), 0
    while left or reading:
        for reader in sorted(left):
            if (source := tree.take(reader)) is not None:
                reading[reader] = source
                left.discard(reader)
        assert reading, "nobody waits for nobody"
        reader = int(rng.choice(sorted(reading)))
        source, fate = reading.pop(reader), rng.random()
        if fate < 0.1 and deaths < 20:
            deaths += 1
            tree.lost(reader)
            left.add(reader)  # its next life
        elif fate < 0.2 and deaths < 20:
            deaths += 1
            tree.broke(reader)
            left.add(reader)
        else:
            if source.serves_on:
                tree.holds(reader, held_by(reader))
            tree.has_read(reader)
            have.add(reader)
    assert have == set(range(1, num_readers + 1))
    assert tree.sent[0] <= fanout + deaths
