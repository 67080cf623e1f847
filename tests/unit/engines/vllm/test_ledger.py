from __future__ import annotations

import numpy as np

from qwengyre.engines.vllm.ledger import BlockLedger, Scheduled


def test_a_request_that_grows_is_known_to_the_token():
    ledger = BlockLedger(block_size=4)
    ledger.record(Scheduled("a", 0, [1, 2, 3], [7], is_new=True))
    ledger.record(Scheduled("a", 3, [4], []))
    ledger.record(Scheduled("a", 4, [5], [9]))
    assert ledger.match([1, 2, 3, 4, 5, 6]) == ([7, 9], 5)
    assert ledger.match([1, 2, 3, 8]) == ([7], 3)
    assert ledger.match([2]) == ([], 0)


def test_what_an_ended_request_computed_is_known_until_its_block_is_given_out():
    ledger = BlockLedger(block_size=2)
    ledger.record(Scheduled("a", 0, [1, 2, 3], [5, 6], is_new=True))
    ledger.end(["a"])
    assert ledger.match([1, 2, 3]) == ([5, 6], 3)
    ledger.record(Scheduled("b", 0, [9], [6], is_new=True))
    assert ledger.match([1, 2, 3]) == ([5], 2)
    ledger.record(Scheduled("b", 1, [9, 9], [5]))
    assert ledger.match([1, 2, 3]) == ([], 0)
    assert ledger.match([9, 9, 9]) == ([6, 5], 3)


def test_shared_blocks_keep_their_content():
    ledger = BlockLedger(block_size=2)
    ledger.record(Scheduled("a", 0, [1, 2, 3, 4], [5, 6], is_new=True))
    ledger.record(Scheduled("b", 0, [1, 2, 8], [5, 7], is_new=True, num_shared=1))
    assert ledger.match([1, 2, 3, 4]) == ([5, 6], 4)
    assert ledger.match([1, 2, 8]) == ([5, 7], 3)


def test_a_preempted_request_starts_again_in_other_blocks():
    ledger = BlockLedger(block_size=2)
    ledger.record(Scheduled("a", 0, [1, 2, 3], [5, 6], is_new=True))
    ledger.record(Scheduled("a", 0, [1, 2], [8], is_new=True))
    assert ledger.match([1, 2, 3]) == ([8], 2)
    ledger.record(Scheduled("b", 0, [4], [5], is_new=True))
    assert ledger.match([1, 2, 3]) == ([8], 2)


def test_nothing_is_known_after_clear_and_news_of_forgotten_requests_is_passed_over():
    ledger = BlockLedger(block_size=2)
    ledger.record(Scheduled("a", 0, [1, 2, 3], [5, 6], is_new=True))
    ledger.clear()
    ledger.record(Scheduled("a", 3, [4], []))
    assert ledger.match([1, 2, 3]) == ([], 0)


def test_ended_requests_are_bounded():
    ledger = BlockLedger(block_size=1, max_ended=2)
    for index in range(4):
        ledger.record(Scheduled(f"r{index}", 0, [index + 1], [index], is_new=True))
    ledger.end(["r0", "r1", "r2", "r3"])
    assert [ledger.match([index + 1])[1] for index in range(4)] == [0, 0, 1, 1]


def test_blocks_hold_what_the_ledger_says():
    """Against the blocks themselves: random requests, shared prefixes, blocks given out again at random."""
    rng, size = np.random.default_rng(3), 3
    ledger, content, free, live = BlockLedger(size), {}, list(range(40)), {}
    for step in range(300):
        while live and (len(free) < 4 or rng.random() < 0.2):
            name = str(rng.choice(list(live)))
            free += [block for block in live.pop(name)[1] if block not in free]
            rng.shuffle(free)
            ledger.end([name])
        name = f"r{step}"
        tokens = rng.integers(1, 3, int(rng.integers(1, 10))).tolist()
        blocks = [free.pop() for _ in range(-(-len(tokens) // size))]
        for index, block in enumerate(blocks):
            content[block] = tokens[index * size : (index + 1) * size]
        ledger.record(Scheduled(name, 0, tokens, blocks, is_new=True))
        live[name] = tokens, blocks
        wanted = rng.integers(1, 3, 8).tolist()
        found, num_tokens = ledger.match(wanted)
        held = [token for block in found for token in content[block]]
        assert held[:num_tokens] == wanted[:num_tokens]
        assert num_tokens >= max(_common(wanted, known) for known, _ in live.values())


def _common(a: list[int], b: list[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
