"""A journal that a gateway wrote before its records became the tree's own is read, and gives the tree that it gave then.

Its records have a field that nobody reads any longer, `tools_digest` of the hints; a reader passes over what it does not know.
"""

from __future__ import annotations

from pathlib import Path

from qwengyre.journal import Journal, read
from qwengyre.trajectory.attempts import recorded_attempts
from qwengyre.trajectory.calls import CallLog
from qwengyre.trajectory.records import Closed, GatewayRecord, Opened
from qwengyre.trajectory.tree import TrajectoryTree

JOURNAL = Path(__file__).with_name("gateway_journal.log")
"""Two attempts of e000012-3, the first still open. In the second: an answer that moved over a publish, was cut and continued, and ended
in a stop string; a call of a sub-agent beside it; a call that failed."""

TOOLS_DIGEST = len(b"\xactools_digest\xa1t")
"""Bytes of the field in msgpack: its name and what it held."""


def records() -> list[GatewayRecord]:
    return [record for _, record in read(JOURNAL, GatewayRecord)]


def test_what_is_written_again_is_read_as_the_same_records(tmp_path: Path):
    with Journal.open(tmp_path / "again.log", GatewayRecord) as journal:
        for record in records():
            journal.append(record)
    assert [record for _, record in read(tmp_path / "again.log", GatewayRecord)] == records()
    dropped = len(JOURNAL.read_bytes()) - (tmp_path / "again.log").stat().st_size
    assert dropped == JOURNAL.read_bytes().count(b"tools_digest") * TOOLS_DIGEST


def test_the_tree_is_the_one_that_was_built_when_it_was_written():
    attempts = {calls.opened.attempt: calls for calls in recorded_attempts(records())}
    assert {number: (calls.is_closed, len(calls)) for number, calls in attempts.items()} == {0: (False, 1), 1: (True, 4)}
    tree = TrajectoryTree(attempts[1])
    tree.validate()
    call = "e000012-3/a1c"
    assert [(node.parent, node.key, node.cause, node.token_ids.tolist(), node.ends) for node in tree.nodes] == [
        (-1, "b7c799a2e3ef17c0", "root", [1, 2, 3, 10, 11, 12, 13, 14, 15], ((7, f"{call}0"),)),
        (0, "bf596de167e8e21b", "retry", [16], ((1, f"{call}1"),)),
        (0, "3fc0bae8b9ab5787", "extends", [20, 21], ((2, f"{call}3"),)),
        (-1, "082a1136bbbb6e62", "root", [8, 30], ((2, f"{call}2"),)),
    ]
    spans = [(span.call, span.first_sampled, span.num_tokens) for node in tree.nodes for span in node.spans if span.trainable]
    assert spans == [(f"{call}0", 0, 2), (f"{call}2", 0, 1)], "the stop string came after the first two of seven tokens"
    logprob_T, version_T = tree.behavior_T(tree.path_of(f"{call}1"))
    assert logprob_T.tolist() == [0, 0, 0, -0.5, -0.25, -0.125, -1, -2, -3, -4]
    assert version_T.tolist() == [-1, -1, -1, 3, 3, 4, 4, 4, 4, 4]


def test_fewest_records_of_a_log_make_an_equal_log():
    (calls,) = (calls for calls in recorded_attempts(records()) if calls.is_closed)
    again = CallLog.of(calls.opened, calls.records())
    assert len(calls.records()) == 4 + 4 + 4, "starts, runs of one version and server, ends"
    assert again.records() == calls.records()
    assert [again.answer_ids(call.number) for call in again] == [calls.answer_ids(call.number) for call in calls]
    assert {type(record) for record in records()} >= {Opened, Closed}
