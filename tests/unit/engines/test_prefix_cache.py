"""The prefix cache against a model that remembers everything, under random use."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.engines.kv import PrefixCache

BLOCK = 4
TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=26).map(lambda tokens: np.array(tokens, np.int32))


class Content:
    """Stands for the bytes: what each block holds, written as calls compute."""

    def __init__(self, num_blocks: int):
        self.cache = PrefixCache(num_blocks, BLOCK)
        self.held: list[tuple[np.ndarray, list[int]]] = []
        self.block_tokens: dict[int, bytes] = {}

    def start(self, tokens: np.ndarray) -> bool:
        """A call that computes `tokens`, sharing what is known; False when there was no room."""
        blocks, known = self.cache.match(tokens)
        whole = known // BLOCK
        blocks = blocks[:whole]
        self.cache.hold(blocks)
        while len(blocks) * BLOCK < len(tokens):
            block = self.cache.take()
            if block is None:
                self.cache.drop(blocks)
                return False
            blocks.append(block)
        for index in range(whole, len(blocks)):
            self.block_tokens[blocks[index]] = tokens[: (index + 1) * BLOCK].tobytes()
        self.held.append((tokens, blocks))
        return True

    def finish(self, index: int) -> None:
        tokens, blocks = self.held.pop(index % len(self.held))
        self.cache.adopt(tokens, blocks)
        self.cache.drop(blocks)

    def check(self) -> None:
        in_use = [block for _, blocks in self.held for block in blocks]
        assert not set(in_use) & set(self.cache._free)
        for tokens, blocks in self.held:
            for index, block in enumerate(blocks):
                held = self.block_tokens[block]
                assert tokens[: (index + 1) * BLOCK].tobytes()[: len(held)] == held[: 4 * len(tokens)]

    def check_match(self, tokens: np.ndarray) -> None:
        blocks, known = self.cache.match(tokens)
        assert known <= len(tokens)
        assert len(blocks) == -(-known // BLOCK)
        for index, block in enumerate(blocks):
            prefix = tokens[: min(known, (index + 1) * BLOCK)].tobytes()
            assert self.block_tokens[block][: len(prefix)] == prefix


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 14),
    st.lists(st.tuples(st.sampled_from(["start", "finish", "match", "clear"]), TOKENS, st.integers(0, 9)), max_size=40),
)
def test_blocks_hold_what_the_tree_says_and_are_never_given_twice(num_blocks, story):
    content = Content(num_blocks)
    for action, tokens, index in story:
        if action == "start":
            content.start(tokens)
        elif action == "finish" and content.held:
            content.finish(index)
        elif action == "clear" and index == 0:
            content.cache.clear()
        content.check()
        content.check_match(tokens)
    while content.held:
        content.finish(0)
    content.cache.clear()
    assert content.cache.num_free == num_blocks


def test_what_was_not_used_for_longest_goes_first():
    content = Content(4)
    first, second = np.arange(8, dtype=np.int32), np.arange(50, 58, dtype=np.int32)
    for tokens in (first, second):
        assert content.start(tokens)
        content.finish(0)
    content.cache.match(first)
    assert content.start(np.arange(90, 98, dtype=np.int32))
    assert content.cache.match(first)[1] == 8
    assert content.cache.match(second)[1] == 0


def test_blocks_of_a_running_call_are_never_given_away():
    content = Content(3)
    assert content.start(np.arange(12, dtype=np.int32))
    assert not content.start(np.arange(50, 54, dtype=np.int32))
    content.finish(0)
    assert content.start(np.arange(50, 54, dtype=np.int32))


def test_a_shorter_last_block_is_found_by_longer_and_shorter_prompts():
    content = Content(8)
    content.start(np.arange(6, dtype=np.int32))
    content.finish(0)
    assert content.cache.match(np.arange(9, dtype=np.int32))[1] == 6
    assert content.cache.match(np.arange(6, dtype=np.int32))[1] == 6
    assert content.cache.match(np.arange(5, dtype=np.int32))[1] == 5
    assert content.cache.match(np.array([0, 1, 2, 3, 4, 9, 9], np.int32))[1] == 5
    assert content.cache.match(np.array([9, 1, 2], np.int32))[1] == 0


def test_two_calls_that_computed_the_same_share_it_afterwards():
    cache = PrefixCache(8, BLOCK)
    tokens = np.arange(8, dtype=np.int32)
    one, two = [cache.take(), cache.take()], [cache.take(), cache.take()]
    cache.adopt(tokens, one)
    cache.adopt(tokens, two)
    assert two == one
    assert cache.num_free == 6
