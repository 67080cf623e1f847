"""The store in which members find each other, and who can use it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from qwengyre.core.errors import Unreachable
from qwengyre.rpc.store import KeyStore, StoreClient

SECRET = b"secret"
TIMEOUT_S = 60.0


@pytest.fixture
def store():
    made = KeyStore("127.0.0.1", SECRET)
    yield made
    made.close()


def test_what_one_says_the_others_hear_and_wait_for(store: KeyStore):
    one, other = (StoreClient(store.address, SECRET, TIMEOUT_S) for _ in range(2))
    one.set("a", b"1")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.wait, ["a", "b"])
        one.set("b", b"\x00\xff")
        assert waiting.result() == (b"1", b"\x00\xff")
    assert (one.add("n", 2), other.add("n", 3)) == (2, 5)
    assert other.wait(["n"]) == (b"5",)
    assert (one.delete("a"), one.delete("a")) == (True, False)
    with pytest.raises(Unreachable, match=r"nobody said a within 0 s"):
        other.wait(["a"], 0.0)
    one.close()
    other.close()


def test_strangers_neither_read_nor_write(store: KeyStore):
    with pytest.raises(Unreachable):
        StoreClient(store.address, b"guess", TIMEOUT_S)
    friend = StoreClient(store.address, SECRET, TIMEOUT_S)
    with pytest.raises(Unreachable):
        friend.wait(["a"], 0.0)
    friend.close()


def test_who_waits_in_a_store_that_is_closed_is_told(store: KeyStore):
    client = StoreClient(store.address, SECRET, TIMEOUT_S)
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        client.wait(["never"])

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        is_waiting.wait()
        store.close()
        with pytest.raises((OSError, Unreachable)):
            waiting.result()
    client.close()
    with pytest.raises(Unreachable):
        StoreClient(store.address, SECRET, TIMEOUT_S)
