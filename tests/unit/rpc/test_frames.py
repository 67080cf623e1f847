"""A byte stream becomes the same frames however it is cut; what is too large is told, and passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.core.errors import MessageTooLarge
from qwengyre.rpc.frames import MAX_MESSAGE_BYTES, Frame, FrameCutter, Oversized, header

BOUND = 20
FRAMES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=3 * BOUND)), max_size=8)


@given(FRAMES, st.lists(st.integers(1, 50), max_size=40))
def test_frames_do_not_depend_on_the_pieces_they_come_in(frames, cuts):
    stream = b"".join(header("x", number, body) + body for number, body in frames)
    cutter, found, at = FrameCutter(BOUND), [], 0
    for size in [*cuts, len(stream)]:
        found += cutter.feed(stream[at : at + size])
        at += size
    expected = [Frame(number, body) if len(body) <= BOUND else Oversized(number, len(body)) for number, body in frames]
    assert found == expected


def test_a_frame_that_is_too_large_takes_no_memory():
    cutter = FrameCutter(BOUND)
    head = (1 << 31).to_bytes(4, "little") + (5).to_bytes(4, "little")
    assert list(cutter.feed(head)) == [Oversized(5, 1 << 31)]
    for _ in range(100):
        assert list(cutter.feed(bytes(1 << 16))) == []
        assert len(cutter._received) == 0


def test_a_message_that_is_too_large_is_not_sent():
    with pytest.raises(MessageTooLarge, match=r"Compute: 21 bytes, and a message can have 20"):
        header("Compute", 1, bytes(BOUND + 1), BOUND)
    assert MAX_MESSAGE_BYTES < 2**32


def test_the_bound_can_change_between_two_frames_that_came_together():
    cutter = FrameCutter(2)
    stream = header("x", 1, b"ab") + b"ab" + header("x", 2, b"abcd") + b"abcd"
    found = []
    for frame in cutter.feed(stream):
        found.append(frame)
        cutter.max_bytes = BOUND
    assert found == [Frame(1, b"ab"), Frame(2, b"abcd")]
