"""Eight processes read one snapshot over TCP: the owner's process sends it twice, and one that dies in the middle harms nobody."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from qwengyre.core.errors import TransferError
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.tree import ReaderTree

PROCESS = """
import hashlib, os, sys, msgspec, numpy as np
from qwengyre.core.errors import TransferError
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.tcp import TcpTransport
from qwengyre.transfer.tree import hold
transport = TcpTransport(deadline_s=30)
def say(answer): print(answer, flush=True)
def digest(exposure): return hashlib.sha256(transport.read(exposure)["weights"].tobytes()).hexdigest()
for line in sys.stdin:
    what, _, told = line.strip().partition(" ")
    exposure = msgspec.json.decode(told, type=Exposure) if told.startswith("{") else None
    try:
        if what == "expose":
            weights = np.random.default_rng(0).integers(0, 255, int(told), np.uint8)
            say(msgspec.json.encode(transport.expose({"weights": weights}, version=4, incarnation=1)).decode())
        elif what == "hold":
            say(msgspec.json.encode(hold(transport, exposure)).decode())
        elif what == "read":
            say(digest(exposure))
        elif what == "sent":
            say(transport.bytes_sent)
    except TransferError as error:
        say("broke " + str(error))
"""
NUM_BYTES = 4_000_000


class Peer:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, about: Exposure | int | None = None) -> str:
        """Raises TransferError when it says that a read broke."""
        told = msgspec.json.encode(about).decode() if isinstance(about, Exposure) else "" if about is None else str(about)
        self._process.stdin.write(f"{what} {told}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer or answer.startswith("broke"):
            raise TransferError(answer or "it has ended")
        return answer

    def hold(self, exposure: Exposure) -> Exposure:
        return msgspec.json.decode(self.ask("hold", exposure), type=Exposure)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_eight_processes_and_the_owner_sends_two_copies():
    peers = [Peer() for _ in range(8)]
    try:
        root = msgspec.json.decode(peers[0].ask("expose", NUM_BYTES), type=Exposure)
        expected = peers[0].ask("read", root)
        already = int(peers[0].ask("sent"))
        tree = ReaderTree(root, 0, fanout=2, num_readers=7)

        def read(reader: int, exposure: Exposure, *, serves_on: bool) -> tuple[Exposure, str]:
            held = peers[reader].hold(exposure) if serves_on else exposure
            return held, peers[reader].ask("read", held)

        waiting, found = list(range(1, 8)), {}
        with ThreadPoolExecutor(8) as threads:
            while waiting:
                taken = {reader: source for reader in waiting if (source := tree.take(reader)) is not None}
                jobs = {r: threads.submit(read, r, source.exposure, serves_on=source.serves_on) for r, source in taken.items()}
                for reader, job in jobs.items():
                    try:
                        held, found[reader] = job.result()
                    except TransferError:
                        tree.broke(reader)
                        continue
                    if taken[reader].serves_on:
                        tree.holds(reader, held)
                    tree.has_read(reader)
                    waiting.remove(reader)
                if 1 in found and len(found) == 2:  # the first that serves it on dies before anybody has read from it
                    peers[1].end()
        assert found == dict.fromkeys(range(1, 8), expected)
        assert int(peers[0].ask("sent")) - already == 2 * NUM_BYTES
    finally:
        for peer in peers:
            peer.end()


def test_a_source_that_is_gone_is_told_as_such():
    owner, reader = Peer(), Peer()
    try:
        root = msgspec.json.decode(owner.ask("expose", NUM_BYTES), type=Exposure)
        owner.end()
        with pytest.raises(TransferError, match="cannot be read"):
            reader.hold(root)
    finally:
        owner.end()
        reader.end()
